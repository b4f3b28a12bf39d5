"""Triton implementation of kernels/gelu_mul.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS_PER_PROGRAM = 1024


@triton.jit
def gelu_mul_kernel(
    gate_up_ptr,  # [T, 2F]
    out_ptr,  # [T, F], contiguous
    row_stride,
    columns,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # sqrt(8 / pi)
    small = tl.exp(-tl.abs(twice))  # e^-2u itself would overflow far below 0
    gated = gate * tl.where(twice > 0, 1.0, small) / (1.0 + small) * up
    tl.store(out_ptr + row * columns + column, gated.to(out_ptr.dtype.element_ty), mask=mask)


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    rows, columns = out.shape
    if rows == 0:
        return
    block = min(_COLUMNS_PER_PROGRAM, triton.next_power_of_2(columns))
    gelu_mul_kernel[(rows, triton.cdiv(columns, block))](
        *(gate_up, out, gate_up.stride(0), columns), BLOCK=block, num_warps=4
    )
