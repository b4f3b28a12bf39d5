"""Triton implementation of kernels/gates.py. A program computes some columns of one row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS_PER_PROGRAM = 1024


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2F]
    out_ptr,  # [T, F], contiguous
    row_stride,
    columns,
    BLOCK: tl.constexpr,
):
    gate, up, place, mask = gate_and_up(gate_up_ptr, row_stride, columns, BLOCK)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + place, gated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_mul_kernel(
    gate_up_ptr,  # [T, 2F]
    out_ptr,  # [T, F], contiguous
    row_stride,
    columns,
    BLOCK: tl.constexpr,
):
    gate, up, place, mask = gate_and_up(gate_up_ptr, row_stride, columns, BLOCK)
    twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # sqrt(8 / pi)
    small = tl.exp(-tl.abs(twice))  # e^-2u itself would overflow far below 0
    gated = gate * tl.where(twice > 0, 1.0, small) / (1.0 + small) * up
    tl.store(out_ptr + place, gated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_and_up(gate_up_ptr, row_stride, columns, BLOCK: tl.constexpr):
    """This program's gates and ups in float32 [BLOCK], where their product belongs in the output, and which exist."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
    return gate, up, row * columns + column, mask


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    _launch(silu_mul_kernel, gate_up, out)


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    _launch(gelu_mul_kernel, gate_up, out)


def _launch(kernel: Any, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    rows, columns = out.shape
    if rows == 0:
        return
    block = min(_COLUMNS_PER_PROGRAM, triton.next_power_of_2(columns))
    kernel[(rows, triton.cdiv(columns, block))](*(gate_up, out, gate_up.stride(0), columns), BLOCK=block, num_warps=4)
