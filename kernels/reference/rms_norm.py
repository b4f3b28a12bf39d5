"""References of kernels/rms_norm.py."""

from __future__ import annotations

import torch

from kernels.reference.precision import widened


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Fills out [T, H]."""
    wide = widened(x)
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widened(weight))


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    new_residual: torch.Tensor,
) -> None:
    """Fills out and new_residual, both [T, H]."""
    new_residual.copy_(widened(x) + widened(residual))
    rms_norm(new_residual, weight, eps, out)
