"""CPU implementation of kernels/gates.py: rowwise.h."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.cpu.library import dtype_code, library


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    _call(library().silu_mul, gate_up, out)


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    _call(library().gelu_mul, gate_up, out)


def _call(op: Callable[..., int], gate_up: torch.Tensor, out: torch.Tensor) -> None:
    op(
        dtype_code(gate_up),
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        *out.shape,
        torch.get_num_threads(),
    )
