"""Random quantised matrices with their values in float64, and what rounding x to integers may do to a product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.quantized import QuantizedMatrix, pack
from tests.kernels.cases import Array, float64


@dataclass(frozen=True)
class Format:
    """offsets: their dtype, or none."""

    bits: int
    group: int | None
    offsets: torch.dtype | None = None


FORMATS = [
    Format(8, None),
    Format(8, 32),
    Format(8, 128, torch.float32),
    Format(4, 32),
    Format(4, 64),
    Format(4, 128),
    Format(4, 32, torch.float16),
    Format(4, 128, torch.float32),
]


def make_matrix(rows: int, columns: int, of: Format) -> tuple[QuantizedMatrix, Array]:
    """The matrix, and W computed here from plain integers."""
    low, high = (-128, 128) if of.bits == 8 else (0, 16)
    levels = torch.randint(low, high, (rows, columns), dtype=torch.int16)
    row_scales = torch.rand(rows) + 0.5
    if of.group is None:
        return pack(levels, bits=of.bits, row_scales=row_scales), float64(levels) * float64(row_scales)[:, None]
    groups = -(-columns // of.group)
    scales = (torch.randn(rows, groups) * 0.1).half()
    offsets = None if of.offsets is None else torch.randn(rows, groups).to(of.offsets)
    middle = 8 if of.bits == 4 and offsets is None else 0
    values = (float64(levels) - middle) * _of_columns(scales, of.group, columns)
    if offsets is not None:
        values += _of_columns(offsets, of.group, columns)
    matrix = pack(levels, bits=of.bits, row_scales=row_scales, scales=scales, offsets=offsets)
    return matrix, values * float64(row_scales)[:, None]


def rounding(x: torch.Tensor, weights: Array) -> Array:
    """The most that integers for x may change x W^T by, [M, N]: half a step for each column."""
    columns = x.shape[1]
    steps = np.empty(x.shape)
    for begin in range(0, columns, 32):
        steps[:, begin : begin + 32] = np.abs(float64(x[:, begin : begin + 32])).max(1, keepdims=True) / 127
    return np.asarray(0.5 * steps @ np.abs(weights).T)


def _of_columns(values: torch.Tensor, group: int, columns: int) -> Array:
    return np.repeat(float64(values), group, axis=1)[:, :columns]
