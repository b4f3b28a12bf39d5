"""Triton implementation of kernels/kv_write.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_cache import QUANTISED_DTYPES, PagedKV
from kernels.triton.kv_formats import quantised_rows

_WARP_ELEMENTS = 256  # 16 bytes a lane


@triton.jit
def kv_write_kernel(
    k_ptr,  # [T, Hkv, D]
    v_ptr,  # likewise
    k_cache_ptr,  # [N, Hkv, block_size, D]
    v_cache_ptr,  # likewise
    k_scales_ptr,  # float32 [N, Hkv, block_size] of a quantised cache, else None
    v_scales_ptr,  # likewise
    slot_ptr,  # [T]
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    cache_head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest value that a quantised cache stores
):
    """One program: all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        h = tl.arange(0, HEADS_PADDED)[:, None]
        d = tl.arange(0, DIM_PADDED)[None, :]
        mask = (h < HEADS) & (d < HEAD_DIM)
        to = (slot // BLOCK_SIZE) * block_stride + h * cache_head_stride + (slot % BLOCK_SIZE) * slot_stride + d
        k = tl.load(k_ptr + token * k_stride + h * k_head_stride + d, mask=mask, other=0.0)
        v = tl.load(v_ptr + token * v_stride + h * v_head_stride + d, mask=mask, other=0.0)
        if k_scales_ptr is not None:
            INTEGERS: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.int8
            k, k_scales = quantised_rows(k, LIMIT, INTEGERS)
            v, v_scales = quantised_rows(v, LIMIT, INTEGERS)
            scales_to = (slot // BLOCK_SIZE) * scale_block_stride + h * scale_head_stride + slot % BLOCK_SIZE
            tl.store(k_scales_ptr + scales_to, k_scales, mask=h < HEADS)
            tl.store(v_scales_ptr + scales_to, v_scales, mask=h < HEADS)
        tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def kv_write(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Writes into `kv`."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    heads_padded, dim_padded = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    kv_write_kernel[(num_tokens,)](
        *(k, v, kv.k, kv.v, kv.k_scales, kv.v_scales, slot_mapping.contiguous()),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1), *kv.k.stride()[:3], *kv.scale_strides),
        HEADS=num_heads,
        HEADS_PADDED=heads_padded,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=kv.block_size,
        LIMIT=QUANTISED_DTYPES.get(kv.k.dtype, 0.0),
        enable_fp_fusion=False,  # the same bytes as on every other device
        num_warps=max(1, min(4, heads_padded * dim_padded // _WARP_ELEMENTS)),
    )
