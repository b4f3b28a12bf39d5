"""Triton implementations of kernels/rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]; not read unless ADD
    weight_ptr,  # [H]
    out_ptr,  # [T, H], contiguous
    new_residual_ptr,  # [T, H], contiguous; not written unless ADD
    x_stride,
    residual_stride,
    eps,
    COLUMNS: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS_PADDED)
    mask = column < COLUMNS
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        rounded = (x + residual).to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + row * COLUMNS + column, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / COLUMNS + eps)
    tl.store(out_ptr + row * COLUMNS + column, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Fills out [T, H]."""
    _launch(x, x, weight, eps, out, out, add=False)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor,
) -> None:
    """Fills out and new_residual, both [T, H]."""
    _launch(x, residual, weight, eps, out, new_residual, add=True)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor,
    *,
    add: bool,
) -> None:
    rows, columns = x.shape
    if rows == 0:
        return
    rms_norm_kernel[(rows,)](
        *(x, residual, weight, out, new_residual, x.stride(0), residual.stride(0), eps),
        COLUMNS=columns,
        COLUMNS_PADDED=triton.next_power_of_2(columns),
        ADD=add,
        num_warps=4,
    )
