"""The implementations that run in this process: the reference, and the C++ of every instruction set of this machine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import pytest

from kernels.cpu import (
    block_copy,
    decoder,
    gates,
    kv_write,
    library,
    linear,
    paged_decode,
    paged_prefill,
    rms_norm,
    rope,
    sampling,
)
from kernels.dispatch import Backend

_CPU_MODULES = (
    block_copy,
    decoder,
    gates,
    kv_write,
    linear,
    paged_decode,
    paged_prefill,
    rms_norm,
    rope,
    sampling,
)
_ISAS = ("baseline", "avx2", "avx512")


@functools.cache
def runnable_isas() -> tuple[str, ...]:
    """Instruction sets up to the best one here."""
    return _ISAS[: _ISAS.index(library.library().isa) + 1]


every_backend = pytest.mark.parametrize("implementation", ["reference", *(f"cpu {isa}" for isa in runnable_isas())])


@functools.cache
def _load(isa: str) -> library.Library:
    return library.load(isa)


@contextlib.contextmanager
def using(implementation: str) -> Iterator[Backend]:
    """The `backend` argument for an entry of every_backend, valid inside the block."""
    backend, _, isa = implementation.partition(" ")
    with contextlib.ExitStack() as stack:
        if isa:
            for module in _CPU_MODULES:
                stack.enter_context(mock.patch.object(module, "library", return_value=_load(isa)))
        yield "cpu" if backend == "cpu" else "reference"
