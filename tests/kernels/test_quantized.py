from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear import LinearWeights, linear
from kernels.quantized import QuantizedMatrix, dequantized, group_of, levels_of, pack
from tests.kernels.backends import every_backend, every_cpu, using
from tests.kernels.cases import TOLERANCE, float64
from tests.kernels.quantized_cases import FORMATS, Format, make_matrix, rounding

every_format = pytest.mark.parametrize("of", FORMATS, ids=str)

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
INT8, INT4 = Format(8, None), Format(4, 32)


@every_format
@pytest.mark.parametrize("columns", [1, 31, 100, 576])
def test_packing_keeps_every_weight(of: Format, columns: int) -> None:
    matrix, values = make_matrix(37, columns, of)
    assert (matrix.bits, matrix.shape) == (of.bits, (37, columns))
    np.testing.assert_allclose(float64(dequantized(matrix)), values, rtol=1e-6, atol=1e-6)


def test_the_order_in_memory_is_as_documented() -> None:
    levels = torch.arange(16 * 8).view(16, 8) % 16
    four = pack(levels, bits=4, scales=torch.ones(16, 1)).packed
    assert all(
        four[0, 0, n, i] >> 4 * half & 15 == levels[n, 4 * half + i]
        for n in range(16)
        for i in range(4)
        for half in (0, 1)
    )
    eight = pack(levels, bits=8).packed
    assert all(eight[0, 0, j, n, i] == levels[n, 4 * j + i] for n in range(16) for j in (0, 1) for i in range(4))
    assert torch.equal(levels_of(pack(levels, bits=8)), levels.to(torch.int16))


@every_backend
@given(
    rows=st.integers(0, 9) | st.sampled_from([16, 65, 101]),
    columns=st.sampled_from([1, 7, 8, 31, 32, 33, 100, 128, 129, 576]),
    part_rows=st.lists(st.sampled_from([1, 7, 15, 16, 17, 64, 100]), min_size=1, max_size=3).map(tuple),
    x_dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    of=st.sampled_from(FORMATS),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_products_equal_float64(
    implementation: str,
    rows: int,
    columns: int,
    part_rows: tuple[int, ...],
    x_dtype: torch.dtype,
    of: Format,
    bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    parts, values = zip(*(make_matrix(n, columns, of) for n in part_rows), strict=True)
    x, added = torch.randn(rows, columns).to(x_dtype), torch.randn(sum(part_rows)).to(x_dtype)
    weights, dense = LinearWeights(parts, added if bias else None), np.concatenate(values)
    with using(implementation) as backend:
        actual = linear(x, weights, backend=backend)
    expected = float64(x) @ dense.T + (float64(added) if bias else 0.0)
    size = np.abs(float64(x)) @ _sizes(parts).T + (np.abs(float64(added)) if bias else 0.0)
    relative = 0.0 if x_dtype == FLOAT32 else TOLERANCE[x_dtype][0]
    bound = rounding(x, _sizes(parts)) + 1e-6 * size + relative * np.abs(expected)
    assert actual.dtype == x_dtype
    assert np.all(np.abs(float64(actual) - expected) <= bound)  # NaN is never less


def _sizes(parts: tuple[QuantizedMatrix, ...]) -> np.ndarray:
    """Of the terms that make each weight: an offset may cancel most of its group's scaled integer."""
    sizes = []
    for part in parts:
        largest = 128.0 if part.bits == 8 else 16.0
        size = torch.full(part.shape, largest) * part.row_scales[: part.rows, None]
        if part.scales is not None:
            bound = part.scales.float().abs() * largest + (0 if part.offsets is None else part.offsets.float().abs())
            of_rows = bound.transpose(1, 2).reshape(-1, bound.shape[1])[: part.rows]
            size = of_rows.repeat_interleave(part.group or 0, 1)[:, : part.columns] * part.row_scales[: part.rows, None]
        sizes.append(float64(size))
    return np.concatenate(sizes)


@every_cpu
@every_format
@pytest.mark.parametrize("columns", [1, 37, 330])
def test_the_reference_rounds_to_the_same_integers(implementation: str, of: Format, columns: int) -> None:
    """So that only float32 sums differ: another integer for one x would be seen."""
    matrix, _ = make_matrix(37, columns, of)
    weights, x = LinearWeights((matrix,)), torch.randn(50, columns) * torch.logspace(-3, 3, 50)[:, None]
    with using(implementation) as backend:
        actual = linear(x, weights, backend=backend)
    expected = linear(x, weights, backend="reference")
    assert np.all(np.abs(float64(actual) - float64(expected)) <= 3e-7 * np.abs(float64(x)) @ _sizes((matrix,)).T)


@every_cpu
@every_format
def test_a_row_depends_on_neither_the_rows_beside_it_nor_the_threads(implementation: str, of: Format) -> None:
    weights = LinearWeights(tuple(make_matrix(n, 330, of)[0] for n in (300, 45)))
    x = torch.randn(150, 330)
    with using(implementation) as backend:
        whole = linear(x, weights, backend=backend)
        for rows in (*range(1, 17), 25, 63, 64, 65, 95, 96, 97, 149):
            assert torch.equal(linear(x[:rows], weights, backend=backend), whole[:rows]), rows
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x, weights, backend=backend), whole)
        parts = [linear(x, LinearWeights((part,)), backend=backend) for part in weights.parts]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@every_cpu
@pytest.mark.parametrize("of", [INT8, INT4], ids=str)
def test_infinities_and_nan_stay_in_their_row(implementation: str, of: Format) -> None:
    matrix, _ = make_matrix(20, 300, of)
    x = torch.randn(7, 300)
    x[2, 299], x[5, 0] = torch.inf, torch.nan
    with using(implementation) as backend:
        out = linear(x, LinearWeights((matrix,)), backend=backend)
    assert out.isfinite().all(1).tolist() == [True, True, False, True, True, False, True]
    assert not out[[2, 5]].isfinite().any()


@every_cpu
@pytest.mark.parametrize("of", [INT8, INT4, Format(8, 128), Format(4, 128)], ids=str)
def test_sums_hold_the_largest_values(implementation: str, of: Format) -> None:
    """All products at their largest, of one sign: a group's sum is still exact."""
    groups = None if of.group is None else torch.ones(16, 2048 // of.group)
    lowest = -128 if of.bits == 8 else 0
    matrix = pack(torch.full((16, 2048), lowest), bits=of.bits, scales=groups)
    with using(implementation) as backend:
        out = linear(torch.full((3, 2048), 2.0), LinearWeights((matrix,)), backend=backend)
    torch.testing.assert_close(out, torch.full((3, 16), 4096.0 * (lowest or -8)), rtol=1e-6, atol=0)


@every_cpu
def test_zeros_and_the_tiniest_values(implementation: str) -> None:
    matrix, _ = make_matrix(16, 64, INT4)
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2, :32] = torch.randn(32)
    with using(implementation) as backend:
        out = linear(x, LinearWeights((matrix,)), backend=backend)
    assert (out[0] == 0).all()
    assert out[1].abs().max() < 1e-35
    assert out[2].abs().max() > 0


@every_cpu
def test_every_finite_half_scales_exactly(implementation: str) -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    matrix = pack(torch.full((len(halves), 1), 9), bits=4, scales=halves[:, None])
    with using(implementation) as backend:
        out = linear(torch.full((1, 1), 127.0), LinearWeights((matrix,)), backend=backend)
    assert torch.equal(out[0], halves.float() * 127.0)


def test_wrong_matrices_are_named() -> None:
    matrix, _ = make_matrix(20, 100, INT4)
    other, _ = make_matrix(20, 100, INT8)
    with pytest.raises(ValueError, match=r"packed has shape \(2, 13, 16, 4\), expected \(3, 13, 16, 4\)"):
        replace(matrix, rows=40)
    with pytest.raises(ValueError, match="scales is None, expected a tensor for weights of 4 bits"):
        replace(matrix, scales=None)
    with pytest.raises(ValueError, match=r"scales has 3 groups for 100 columns: expected groups of \(32, 64, 128\)"):
        replace(matrix, scales=torch.zeros(2, 3, 16).half())
    with pytest.raises(TypeError, match=r"scales has dtype torch\.float32, expected torch\.float16"):
        replace(matrix, scales=torch.zeros(2, 4, 16))
    with pytest.raises(TypeError, match="offsets: expected float16 or float32"):
        replace(matrix, offsets=torch.zeros(2, 4, 16).double())
    with pytest.raises(TypeError, match=r"parts\[1\] is quantised 8 None None, expected quantised 4 32 None"):
        LinearWeights((matrix, other))
    with pytest.raises(ValueError, match=r"parts\[1\] has shape \(20, 99\), expected \(\*, 100\)"):
        LinearWeights((matrix, make_matrix(20, 99, INT4)[0]))
    with pytest.raises(TypeError, match=r"parts\[1\] is quantised 4 32 None, expected plain torch.float32"):
        LinearWeights((torch.zeros(3, 100), matrix))


def test_group_sizes_follow_from_their_number() -> None:
    assert [group_of(576, n) for n in (18, 9, 5, 4)] == [32, 64, 128, None]
