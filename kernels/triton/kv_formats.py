"""Rows of K or V to what a quantised cache stores; kernels/kv_write.py is the contract."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
SMALLEST_PEAK = tl.constexpr(2.0**-100)
ROUNDS_TO_INTEGER = tl.constexpr(1.5 * 2**23)  # adding it leaves no bits for fractions


@triton.jit
def quantised_rows(rows, LIMIT: tl.constexpr, INTEGERS: tl.constexpr):
    """rows [R, D] -> float32 values to store [R, D] and scales [R, 1]. To be compiled without fused multiply-add."""
    wide = rows.to(tl.float32)
    size = tl.abs(wide)
    finite = size <= LARGEST_FLOAT
    sick = tl.max(tl.where(finite, 0, 1), 1, keep_dims=True) > 0
    peak = tl.max(tl.where(finite, size, 0.0), 1, keep_dims=True)
    usable = (peak >= SMALLEST_PEAK) & (sick == 0)
    divisor = tl.where(usable, peak, 1.0)
    limit = tl.full(divisor.shape, LIMIT, tl.float32)
    scaled = tl.minimum(tl.maximum(wide * tl.div_rn(limit, divisor), -LIMIT), LIMIT)
    scaled = tl.where(usable, scaled, 0.0)
    if INTEGERS:
        scaled = (scaled + ROUNDS_TO_INTEGER) - ROUNDS_TO_INTEGER
    scales = tl.where(usable, tl.div_rn(divisor, limit), 0.0)
    return scaled, tl.where(sick, float("nan"), scales)
