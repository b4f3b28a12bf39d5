"""The judgement of the compile table, on figures and code made by hand; test_triton_compiles.py compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.compiled.configurations import Configuration
from tests.kernels.compiled.expectations import broken
from tests.kernels.compiled.machine_code import Figures, nvidia_load_bytes, nvidia_matrix, wide_share
from tests.kernels.compiled.table import Row, from_markdown, merged, regressions, stale, to_markdown
from tests.kernels.compiled.targets import TARGETS

GOOD = Figures(
    warps=8,
    registers=180,
    spill_bytes=0,
    shared_bytes=98_560,
    matrix="wgmma",
    num_matrix=12,
    wide_share=0.94,
)
ROW = Row(target="sm_90", kernel="prefill_kernel", configuration="prefill llama-3-8b bfloat16", figures=GOOD)


def reasons(
    figures: Figures,
    kernel: str = "prefill_kernel",
    target: str = "sm_90",
    matrix: bool = True,
    narrow_because: str | None = None,
) -> list[str]:
    configuration = Configuration(name="prefill", launch=print, matrix=matrix, narrow_because=narrow_because)
    return list(broken(TARGETS[target], kernel, configuration, figures))


def worse(figures: Figures) -> list[str]:
    return list(regressions([replace(ROW, figures=figures)], [ROW]))


def test_good_figures_break_nothing() -> None:
    assert reasons(GOOD) == []
    assert reasons(replace(GOOD, matrix="mma"), "decode_split_kernel") == []


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (replace(GOOD, spill_bytes=8), "spilled bytes = 8, at most 0"),
        (replace(GOOD, shared_bytes=232_449), "shared bytes = 232449, at most 232448"),
        (replace(GOOD, wide_share=0.5), "wide loads = 50% of the bytes, at least 80%"),
        (replace(GOOD, matrix="mma"), "matrix = mma, expected wgmma"),
        (replace(GOOD, matrix="none", num_matrix=0), "matrix = none, expected wgmma"),
    ],
)
def test_each_limit_is_named_with_its_figure(figures: Figures, text: str) -> None:
    assert reasons(figures) == [text]


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_small_spills_are_tolerated_where_registers_multiply_matrices(target: str) -> None:
    spilling = replace(GOOD, matrix="mma", shared_bytes=0, spill_bytes=32)
    assert reasons(spilling, target=target) == []
    assert reasons(replace(spilling, spill_bytes=40), target=target) == ["spilled bytes = 40, at most 32"]


def test_matrix_units_are_asked_of_dtypes_that_have_them() -> None:
    scalar = replace(GOOD, matrix="none", num_matrix=0)
    assert reasons(scalar, matrix=False) == []
    assert reasons(scalar, "decode_split_kernel") == ["matrix = none, expected instructions of a matrix unit"]


def test_a_configuration_may_say_why_its_loads_are_narrow() -> None:
    assert reasons(replace(GOOD, wide_share=0.1), narrow_because="short rows") == []


def test_a_kernel_without_expectations_is_refused() -> None:
    assert "has no entry in tests/kernels/compiled/expectations.py" in reasons(GOOD, "new_kernel")[0]


def test_the_table_reads_back_what_it_wrote() -> None:
    scalar = Row(
        target="gfx942",
        kernel="draw_kernel",
        configuration="draw llama-3-8b",
        figures=Figures(8, 71, 0, 128, "none", 0, 1.0),
    )
    text = "# Title\n\nSome words.\n\n" + to_markdown([ROW, scalar])
    assert from_markdown(text) == [ROW, scalar]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no table", "the table's header is missing"),
        (to_markdown([ROW]) + "| a | b |\n", "a row of 2 cells"),
        (to_markdown([ROW]).replace("wgmma", "abacus"), "matrix = 'abacus' in the table: must be one of none, mma"),
    ],
)
def test_a_spoilt_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_markdown(text)


def test_small_changes_are_no_regression() -> None:
    assert worse(GOOD) == []
    assert worse(replace(GOOD, registers=195, shared_bytes=99_000, wide_share=0.93, num_matrix=8)) == []
    assert worse(replace(GOOD, registers=90, shared_bytes=0, wide_share=1.0, matrix="tcgen05")) == []


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (replace(GOOD, registers=240), "registers = 240, in the table it was at most 202 with tolerance"),
        (replace(GOOD, spill_bytes=1), "spilled bytes = 1, in the table it was at most 0"),
        (replace(GOOD, shared_bytes=110_000), "shared bytes = 110000, in the table it was at most 100531"),
        (replace(GOOD, matrix="mma"), "matrix = mma, in the table it was wgmma"),
        (replace(GOOD, wide_share=0.8), "wide loads = 80%, in the table 94%"),
    ],
)
def test_regressions_name_row_figure_and_limit(figures: Figures, text: str) -> None:
    (reason,) = worse(figures)
    assert reason.startswith("sm_90 prefill_kernel (prefill llama-3-8b bfloat16): " + text)


def test_rows_that_are_new_or_gone() -> None:
    assert "not in the table" in next(regressions([ROW], []))
    assert list(stale([ROW], [ROW])) == []
    assert "no longer compiled" in next(stale([], [ROW]))


def test_rows_are_replaced_by_name_and_kept_in_order() -> None:
    decode = Row(
        target="sm_90", kernel="decode_split_kernel", configuration="decode smollm2-135m bfloat16", figures=GOOD
    )
    other, changed = replace(ROW, target="sm_80"), replace(ROW, figures=replace(GOOD, registers=1))
    gone = replace(ROW, configuration="of a kernel that was deleted")
    assert merged([ROW, gone, other], [decode, changed]) == [other, changed, decode]


def test_what_is_read_from_code() -> None:
    code = """
        /*0100*/  LDG.E R4, desc[UR4][R2.64] ;
        /*0110*/  LDGSTS.E.BYPASS.128 [R9], desc[UR4][R4.64] ;
        /*0120*/  LDGDEPBAR ;
        /*0130*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0140*/  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ ;
        /*0150*/  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
    """
    assert nvidia_matrix(code) == ("wgmma", 2)
    assert nvidia_matrix("UTCHMMA gdesc[UR4]") == ("tcgen05", 1)
    assert nvidia_matrix("FFMA R1, R2, R3, R4") == ("none", 0)
    assert [nvidia_load_bytes(m) for m in (".E", ".E.64", ".E.128.CONSTANT", ".E.U8", ".E.ENL2.256")] == [
        4,
        8,
        16,
        1,
        32,
    ]
    assert wide_share([32 * 4, 32 * 16]) == pytest.approx(16 / 20)
    assert wide_share([64 * 4, 64 * 8]) == pytest.approx(8 / 12)
    assert wide_share([]) == 1.0
