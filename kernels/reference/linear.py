"""Reference of kernels/linear.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear import LinearWeights
from kernels.quantized import QuantizedMatrix, dequantized
from kernels.reference.precision import widened


def linear(x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
    """Fills out [M, N]."""
    begin = 0
    for part in weights.parts:
        end = begin + part.shape[0]
        out[:, begin:end] = _product(x, part, None if weights.bias is None else weights.bias[begin:end])
        begin = end


def _product(x: torch.Tensor, part: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    weight = dequantized(part) if isinstance(part, QuantizedMatrix) else part
    if weight.dtype == x.dtype:  # torch sums in float32 and rounds once by itself
        return F.linear(x, weight, bias)
    wide = widened(x)
    return F.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
