"""Chooses who computes an op: the reference, our C++ on CPUs, or Triton on GPUs.

Each implementation is a function `<backend>/<module>.py:<op>` that fills outputs which the public op allocated, or
prepares one that will. Modules load on first use, so importing `kernels` on a machine without Triton or a compiler
costs and breaks nothing.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

Backend = Literal["reference", "cpu", "triton"]

# What the C++ computes; any other dtype on a CPU goes to the reference.
CPU_DTYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger(__name__)


def implementation(
    module: str,
    op: str,
    tensor: torch.Tensor,
    backend: Backend | None,
    *,
    cpu_dtypes: tuple[torch.dtype, ...] = CPU_DTYPES,
) -> Callable[..., Any]:
    """The function that computes `op` for `tensor`'s device and dtype; `backend` overrides the choice.

    cpu_dtypes: what the op's C++ takes, for an op that computes with other dtypes than most.
    Raises ValueError for an unknown backend or one that cannot take the tensor, CompilerMissing for an explicit
    "cpu" that cannot be built.
    """
    if backend is None:
        chosen = default_backend(tensor.device.type, tensor.dtype, cpu_dtypes)
    else:
        chosen = _checked(backend, tensor, cpu_dtypes)
    return _load(chosen, module, op)


def _checked(backend: Backend, tensor: torch.Tensor, cpu_dtypes: tuple[torch.dtype, ...]) -> Backend:
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is not one of {', '.join(get_args(Backend))}")
    if backend == "cpu" and (tensor.device.type != "cpu" or tensor.dtype not in cpu_dtypes):
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in cpu_dtypes)
        raise ValueError(f"backend='cpu' takes {allowed} on the CPU, got {tensor.dtype} on {tensor.device.type}")
    return backend


def default_backend(device: str, dtype: torch.dtype, cpu_dtypes: tuple[torch.dtype, ...] = CPU_DTYPES) -> Backend:
    """Who computes on `device` (its type) when nobody says otherwise."""
    if device == "cuda":
        return "triton"
    if device == "cpu" and dtype in cpu_dtypes and _cpu_library_loads():
        return "cpu"
    return "reference"


@functools.cache
def _cpu_library_loads() -> bool:
    from kernels.cpu.build import CompilerMissing  # noqa: PLC0415  (only machines that compute on CPUs need it)
    from kernels.cpu.library import library  # noqa: PLC0415

    try:
        library()
    except CompilerMissing as error:
        _log.warning("%s Until then the slow torch reference computes.", error)
        return False
    return True


@functools.cache
def _load(backend: Backend, module: str, op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"kernels.{backend}.{module}"), op)
    return function
