"""Root-mean-square normalisation (Zhang and Sennrich, 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 and rounded once.

    x: [T, H]; weight: [H], of x's dtype. Returns [T, H]. Raises ValueError or TypeError for shapes and dtypes.
    """
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    implementation("rms_norm", "rms_norm", x, backend)(x, weight, eps, out)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded to x's dtype before it is normalised.

    x, residual: [T, H]; weight: [H], all of one dtype. Returns two new [T, H] tensors.
    Raises ValueError or TypeError for shapes and dtypes.
    """
    _check(x, weight)
    check_shape("residual", residual, tuple(x.shape))
    check_dtype("residual", residual, x.dtype)
    check_rows("residual", residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run = implementation("rms_norm", "fused_add_rms_norm", x, backend)
    run(x, residual, weight, eps, out, new_residual)
    return out, new_residual


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_shape("x", x, (None, None))
    check_rows("x", x)
    check_shape("weight", weight, (x.shape[1],))
    check_dtype("weight", weight, x.dtype)
    check_rows("weight", weight)
