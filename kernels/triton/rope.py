"""Triton implementation of kernels/rope.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARP_ELEMENTS = 1024  # of the halves of q: then k, which is smaller, is still loaded 16 bytes a lane


@triton.jit
def rotate_heads(
    base,  # one token's [heads, D]
    head_stride,
    cos,  # [1, HALF_PADDED]
    sin,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    h = tl.arange(0, HEADS_PADDED)[:, None]
    i = tl.arange(0, HALF_PADDED)[None, :]
    mask = (h < HEADS) & (i < HALF)
    to = base + h * head_stride + i
    first = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(to + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, (first * cos - second * sin).to(base.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (second * cos + first * sin).to(base.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D]
    position_ptr,  # [T]
    cos_ptr,  # [P, R / 2]
    sin_ptr,  # likewise
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    Q_HEADS_PADDED: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """One program: all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    i = tl.arange(0, HALF_PADDED)[None, :]
    cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    rotate_heads(q_ptr + token * q_stride, q_head_stride, cos, sin, Q_HEADS, Q_HEADS_PADDED, HALF, HALF_PADDED)
    rotate_heads(k_ptr + token * k_stride, k_head_stride, cos, sin, K_HEADS, K_HEADS_PADDED, HALF, HALF_PADDED)


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] in place."""
    num_tokens, q_heads, _ = q.shape
    if num_tokens == 0:
        return
    k_heads = k.shape[1]
    pairs = cos.shape[1]
    half = triton.next_power_of_2(pairs)
    rope_kernel[(num_tokens,)](
        *(q, k, positions.contiguous(), cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1)),
        Q_HEADS=q_heads,
        Q_HEADS_PADDED=triton.next_power_of_2(q_heads),
        K_HEADS=k_heads,
        K_HEADS_PADDED=triton.next_power_of_2(k_heads),
        HALF=pairs,
        HALF_PADDED=half,
        num_warps=max(1, min(8, triton.next_power_of_2(q_heads) * half // _WARP_ELEMENTS)),
    )
