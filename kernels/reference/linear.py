"""Reference of kernels/linear.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear import LinearWeights, Part
from kernels.panels import PanelMatrix, unpacked
from kernels.quantized import GROUPS, QuantizedMatrix, dequantized
from kernels.reference.precision import widened

_SMALLEST_RANGE = 1e-30  # a group with nothing larger counts as zeros: its inverse would overflow


def linear(x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
    """Fills out [M, N]."""
    begin = 0
    for part in weights.parts:
        end = begin + part.shape[0]
        out[:, begin:end] = _product(x, part, None if weights.bias is None else weights.bias[begin:end])
        begin = end


def _product(x: torch.Tensor, part: Part, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(part, QuantizedMatrix):
        return F.linear(rounded(x), dequantized(part), None if bias is None else bias.float())
    if isinstance(part, PanelMatrix):
        part = unpacked(part)
    if part.dtype == x.dtype:  # torch sums in float32 and rounds once by itself
        return F.linear(x, part, bias)
    wide = widened(x)
    return F.linear(wide, part.to(wide.dtype), None if bias is None else bias.to(wide.dtype))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What stands for x in a product with integers, float32 [M, K]: integers times a scale for each row and group."""
    group = min(GROUPS)
    rows, columns = x.shape
    groups = F.pad(x.float(), (0, -columns % group)).view(rows, -(-columns // group), group)
    ranges = groups.abs().amax(2, keepdim=True)
    largest, zeros = torch.full_like(ranges, 127.0), torch.zeros_like(ranges)
    inverse = torch.where(ranges > _SMALLEST_RANGE, largest / ranges, zeros)  # not 127.0 / ranges: that rounds twice
    scales = torch.where(ranges < _SMALLEST_RANGE, zeros, ranges / largest)
    padded: torch.Tensor = ((groups * inverse).round() * scales).view(rows, groups.shape[1] * group)
    return padded[:, :columns]
