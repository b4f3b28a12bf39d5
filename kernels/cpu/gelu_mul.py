"""CPU implementation of kernels/gelu_mul.py: rowwise.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import dtype_code, library


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    library().gelu_mul(
        dtype_code(gate_up),
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        *out.shape,
        torch.get_num_threads(),
    )
