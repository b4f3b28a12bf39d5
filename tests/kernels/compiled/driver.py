"""Compiles launches for a GPU that is not here: a driver that only names its target lets the real launchers run on CPU
tensors, each launch compiles, specialised as on the device (alignment, strides of 1), and is not run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.compiled.targets import TARGETS, Target

Compiled = tuple[str, Any]  # name of the kernel, Triton's CompiledKernel


class _CompileOnlyDriver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device = list(TARGETS).index(target.name)  # Triton keeps what it compiled by device number

    def get_current_target(self) -> GPUTarget:
        return self._target.triton

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled_launches(target: Target, work: Callable[[], object]) -> list[Compiled]:
    """Runs `work`; returns what its launches compiled to, in order. Raises what the compiler raises."""
    launches: list[Compiled] = []
    with _compile_only(target, launches):
        work()
    return launches


@contextmanager
def _compile_only(target: Target, launches: list[Compiled]) -> Iterator[None]:
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: a process either interprets kernels or compiles them")
    stock_run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self.fn.__name__, stock_run(self, *args, grid=grid, warmup=True, **options)))

    driver.set_active(_CompileOnlyDriver(target))
    # what Triton 3.9 does when it is unset, but with a warning
    environment = mock.patch.dict(os.environ, {"TRITON_DEFAULT_FP_FUSION": "1"})
    hip = mock.patch.object(torch.version, "hip", "6.4" if target.backend == "hip" else None)  # launchers may ask
    with environment, hip, mock.patch.object(JITFunction, "run", compile_only):
        yield
