"""The mutants themselves; `make mutants` judges all of them."""

from __future__ import annotations

import pytest

from tests.kernels.mutants.catalogue import KERNELS, MUTANTS, Mutant, SourceMovedOn
from tests.kernels.mutants.runner import judge

CHEAP = ("rms_norm: residual not added", "rope: turned the other way", "kv_write: wrong slot")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies_to_its_source(mutant: Mutant) -> None:
    source = (KERNELS / f"{mutant.kernel}.py").read_text()
    compile(mutant.applied(source), mutant.kernel, "exec")


def test_every_kernel_has_mutants() -> None:
    with_kernels = {path.stem for path in KERNELS.glob("*.py") if "@triton.jit" in path.read_text()}
    assert {mutant.kernel for mutant in MUTANTS} == with_kernels


def test_names_differ() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_a_source_that_moved_on_is_named() -> None:
    mutant = Mutant("rope", "turned the other way", "a - b", "a + b", "test_rope")
    with pytest.raises(SourceMovedOn, match="rope: turned the other way: 'a - b' occurs 2 times, expected once"):
        mutant.applied("a - b, a - b")


@pytest.mark.triton_interpreter
@pytest.mark.parametrize("name", CHEAP)
def test_some_are_caught(name: str) -> None:
    verdict = judge(next(mutant for mutant in MUTANTS if mutant.name == name))
    assert verdict.caught_by is not None


@pytest.mark.triton_interpreter
def test_a_harmless_change_survives() -> None:
    harmless = Mutant(
        "rope", "sum in another order", "second * cos + first * sin", "first * sin + second * cos", "test_rope"
    )
    assert judge(harmless).caught_by is None
