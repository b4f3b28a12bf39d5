"""Triton implementation of kernels/linear.py for quantised weights; plain ones belong to torch, the vendor's library.

Weights stay small integers up to the tensor cores, whose input type holds them exactly. Scales come after the sums of
their groups: one scaling a group and output instead of one a weight, and no weight is ever rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.linear import LinearWeights
from kernels.panels import PANEL
from kernels.quantized import MIDDLE, QuantizedMatrix

_MAX_ROW_BYTES = 128  # of a column of x, for a program: consumer GPUs have 99 KiB of shared memory
_FEW_ROWS = 16  # a decode step: few columns for a program then, so that there are programs enough to read the weights
_OUT_COLUMNS = {16: 32, 32: 64, 64: 64}
_UNGROUPED_DEPTH = 64  # columns of x for a loop iteration, where no group says how many


@triton.jit
def unpack(pieces, BITS: tl.constexpr, SUBTRACT: tl.constexpr):
    """int32 [K / n, N] of n weights each -> int32 [K, N]; kernels/quantized.py has the order."""
    if BITS == 4:
        i = tl.arange(0, 8)[None, :, None]
        levels = ((pieces[:, None, :] >> (i % 4 * 8 + i // 4 * 4)) & 15) - SUBTRACT
    else:
        i = tl.arange(0, 4)[None, :, None]
        levels = (pieces[:, None, :] << (24 - 8 * i)) >> 24  # with its sign
    return tl.reshape(levels, [levels.shape[0] * levels.shape[1], levels.shape[2]])


@triton.jit
def quantized_linear_kernel(
    x_ptr,  # [M, K]
    pieces_ptr,  # int32, of 8 columns (4 bits) or 4 (8 bits): [P, num_pieces, PANEL]
    scale_ptr,  # float16 [P, groups, PANEL]; not read unless GROUPED
    offset_ptr,  # likewise; not read unless OFFSETS
    row_scale_ptr,  # float32 [P * PANEL]
    bias_ptr,  # [N]; not read unless BIAS
    out_ptr,  # [M, N]
    rows,
    columns,
    depth,
    num_pieces,
    num_groups,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    GROUPED: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    PANEL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # of a loop iteration: a group where there are groups
):
    """One program: ROWS x COLUMNS outputs. Neighbours share their weights."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    PER_PIECE: tl.constexpr = 32 // BITS
    row = m.to(tl.int64)
    panel = (n // PANEL).to(tl.int64)
    lane = n % PANEL
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(tl.cdiv(depth, DEPTH)):
        k = group * DEPTH + tl.arange(0, DEPTH)
        x_mask = (m < rows)[:, None] & (k < depth)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
        piece = group * (DEPTH // PER_PIECE) + tl.arange(0, DEPTH // PER_PIECE)
        mask = (piece < num_pieces)[:, None] & (n < columns)[None, :]
        at = (panel[None, :] * num_pieces + piece[:, None]) * PANEL + lane[None, :]
        pieces = tl.load(pieces_ptr + at, mask=mask, other=0)
        weights = unpack(pieces, BITS, SUBTRACT).to(x.dtype)
        products = tl.dot(x, weights, input_precision="ieee")
        if GROUPED:
            at_group = (panel * num_groups + group) * PANEL + lane
            scales = tl.load(scale_ptr + at_group, mask=n < columns, other=0.0).to(tl.float32)
            products *= scales[None, :]
        if OFFSETS:
            offsets = tl.load(offset_ptr + at_group, mask=n < columns, other=0.0).to(tl.float32)
            products += tl.sum(x.to(tl.float32), 1)[:, None] * offsets[None, :]
        acc += products
    acc *= tl.load(row_scale_ptr + n, mask=n < columns, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + row[:, None] * out_stride + n[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def linear(x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
    """Fills out [M, N]. Raises TypeError for weights that are not quantised."""
    begin = 0
    for part in weights.parts:
        if not isinstance(part, QuantizedMatrix):
            raise TypeError(f"weights are {part.dtype}: backend='triton' multiplies quantised weights only")
        end = begin + part.rows
        _launch(x, part, None if weights.bias is None else weights.bias[begin:end], out[:, begin:end])
        begin = end


def _launch(x: torch.Tensor, part: QuantizedMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    rows, depth = x.shape
    if rows == 0 or part.rows == 0:
        return
    pieces = part.packed.view(torch.int32)
    tile = min(_MAX_ROW_BYTES // x.element_size(), max(_FEW_ROWS, triton.next_power_of_2(rows)))
    columns = _OUT_COLUMNS[tile]
    unused = part.row_scales
    quantized_linear_kernel[(triton.cdiv(rows, tile), triton.cdiv(part.rows, columns))](
        *(x, pieces, _or(part.scales, unused), _or(part.offsets, unused), part.row_scales, _or(bias, unused), out),
        *(rows, part.rows, depth, pieces.numel() // (pieces.shape[0] * PANEL), _num_groups(part)),
        *(x.stride(0), out.stride(0)),
        BITS=part.bits,
        SUBTRACT=MIDDLE if part.bits == 4 and part.offsets is None else 0,
        GROUPED=part.scales is not None,
        OFFSETS=part.offsets is not None,
        BIAS=bias is not None,
        PANEL=PANEL,
        ROWS=tile,
        COLUMNS=columns,
        DEPTH=part.group or _UNGROUPED_DEPTH,
        num_warps=4,
    )


def _or(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if tensor is None else tensor


def _num_groups(part: QuantizedMatrix) -> int:
    return 1 if part.scales is None else part.scales.shape[1]
