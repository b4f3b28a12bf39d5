"""The implementations that run in this process: the reference, and the C++ of every instruction set of this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from unittest import mock

import pytest

import kernels.cpu
from kernels.cpu import library
from kernels.dispatch import Backend

_MODULES = [importlib.import_module(f"kernels.cpu.{each.name}") for each in pkgutil.iter_modules(kernels.cpu.__path__)]
_CALLERS = [module for module in _MODULES if module is not library and hasattr(module, "library")]
_ISAS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")


@functools.cache
def runnable_isas() -> tuple[str, ...]:
    """Instruction sets up to the best one here."""
    return _ISAS[: _ISAS.index(library.library().isa) + 1]


_CPUS = [f"cpu {isa}" for isa in runnable_isas()]
every_cpu = pytest.mark.parametrize("implementation", _CPUS)
every_backend = pytest.mark.parametrize("implementation", ["reference", *_CPUS])


@functools.cache
def _load(isa: str) -> library.Library:
    return library.load(isa)


@contextlib.contextmanager
def using(implementation: str) -> Iterator[Backend]:
    """The `backend` argument for an entry of every_backend, valid inside the block."""
    backend, _, isa = implementation.partition(" ")
    with contextlib.ExitStack() as stack:
        if isa:
            for module in _CALLERS:
                stack.enter_context(mock.patch.object(module, "library", return_value=_load(isa)))
        yield "cpu" if backend == "cpu" else "reference"
