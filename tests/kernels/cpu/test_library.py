from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.cpu import library
from tests.kernels.backends import runnable_isas


def test_the_best_instruction_set_of_this_processor_is_chosen() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    assert ("avx2" in runnable_isas()) == bool(re.search(r"\bavx2\b", flags) and re.search(r"\bfma\b", flags))
    assert ("avx512" in runnable_isas()) == bool(
        re.search(r"\bavx512vl\b", flags) and re.search(r"\bavx512dq\b", flags)
    )
    bf16 = bool(re.search(r"\bavx512_bf16\b", flags) and re.search(r"\bavx512_vnni\b", flags))
    assert ("avx512bf16" in runnable_isas()) == bf16
    assert ("amx" in runnable_isas()) == bool(re.search(r"\bamx_bf16\b", flags))


@pytest.mark.parametrize("isa", runnable_isas())
def test_a_lesser_one_can_be_asked_for(isa: str) -> None:
    assert library.load(isa).isa == isa


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(ValueError, match="isa='mmx' is unknown or cannot run on this processor"):
        library.load("mmx")


def test_the_mirror_agrees_with_the_header() -> None:
    header = (Path(library.__file__).parent / "ops.h").read_text()
    assert re.search(r"MAX_HEAD_DIM = (\d+);", header)[1] == str(library.MAX_HEAD_DIM)  # type: ignore[index]  # a match
    linear = (Path(library.__file__).parent / "linear_panels.h").read_text()
    assert re.search(r"MAX_DEPTH = (\d+);", linear)[1] == str(library.MAX_DEPTH)  # type: ignore[index]  # a match
    assert re.search(r"OK = (-?\d+);", header)[1] == str(library.OK)  # type: ignore[index]  # a match
    operations = re.findall(r"int64_t \(\*(\w+)\)", header)
    assert operations == [name for name, _ in library._Ops._fields_[1:]]
