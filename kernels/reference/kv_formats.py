"""Rows of K or V to what a quantised cache stores, and back."""

from __future__ import annotations

import torch

from kernels.kv_cache import QUANTISED_DTYPES, SMALLEST_PEAK


def quantised(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[*, D] -> [*, D] of `dtype` and float32 scales [*]; kernels/kv_write.py says how."""
    wide = rows.float()
    peaks = wide.abs().amax(-1)
    limit = QUANTISED_DTYPES[dtype]
    limits = torch.full_like(peaks, limit)  # torch divides by a number by multiplying with its reciprocal
    finite, visible = peaks.isfinite(), peaks >= SMALLEST_PEAK
    scales = torch.where(finite, torch.where(visible, peaks / limits, 0.0), torch.nan)
    scaled = (wide * (limits / peaks)[..., None]).clamp(-limit, limit)
    stored = torch.where((finite & visible)[..., None], scaled, 0.0)
    return (stored.round() if dtype == torch.int8 else stored).to(dtype), scales


def dequantised(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[*, D] and its scales [*] -> float32 [*, D]."""
    return rows.float() * scales[..., None]
