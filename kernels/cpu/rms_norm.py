"""CPU implementations of kernels/rms_norm.py: rowwise.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import dtype_code, library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Fills out [T, H]."""
    _run(x, None, weight, eps, out, None)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor,
) -> None:
    """Fills out and new_residual, both [T, H]."""
    _run(x, residual, weight, eps, out, new_residual)


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor | None,
) -> None:
    library().rms_norm(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        None if new_residual is None else new_residual.data_ptr(),
        *x.shape,
        torch.get_num_threads(),
    )
