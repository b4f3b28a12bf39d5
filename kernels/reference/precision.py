"""The precision in which references compute."""

from __future__ import annotations

import torch


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in float32, or as it is when it is float64 already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
