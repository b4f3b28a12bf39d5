"""Soft caps of attention scores (Gemma 2)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores / cap), elementwise in float32."""
    x = scores / cap
    size = tl.abs(x)
    square = x * x
    # near 0 a polynomial (Moshier's Cephes), where the quotient of exponentials would cancel
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    small = tl.exp(-2.0 * size)
    quotient = (1.0 - small) / (1.0 + small)
    return cap * tl.where(size < 0.625, p * square * x + x, tl.where(x < 0, -quotient, quotient))
