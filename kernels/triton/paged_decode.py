"""Triton implementation of kernels/paged_decode.py: flash decoding (Dao et al., 2023) over a paged cache.

A sequence's context is cut into splits of a fixed number of tokens, so a sequence's result does not depend on what else
is in the batch; a second kernel merges the splits by their log-sum-exps.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PagedKV
from kernels.triton.soft_cap import capped

_LOG2_E = math.log2(math.e)
_SPLIT_TOKENS = 512
_KEYS = 64  # per loop iteration
_KEY_BYTES = 512  # a longer head takes fewer keys: consumer GPUs have 99 KiB of shared memory
_MIN_DOT = 16  # smallest dimension of a tl.dot


@triton.jit
def decode_split_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [N, Hkv, block_size, D]
    v_ptr,  # likewise
    table_ptr,  # [B, M]
    len_ptr,  # [B]
    partial_ptr,  # float32 [B, Hq, splits, D]
    lse_ptr,  # float32 [B, Hq, splits]: log2 of the sum of exp2 of the split's scores
    scale_log2e,
    q_stride,
    q_head_stride,
    block_stride,
    cache_head_stride,
    slot_stride,
    table_stride,
    num_splits,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # latest tokens that are seen, or None: all
    SOFT_CAP_LOG2E: tl.constexpr,  # or None
):
    """One program: one split of one sequence's context, for all query heads of one kv head."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(len_ptr + sequence)
    begin = split * SPLIT_TOKENS
    end = tl.minimum(begin + SPLIT_TOKENS, context_len)
    if WINDOW is not None:
        begin = tl.maximum(begin, context_len - WINDOW)

    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + sequence * q_stride + head[:, None] * q_head_stride + d[None, :], mask=q_mask, other=0.0)

    peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        valid = position < end
        block = tl.load(table_ptr + sequence * table_stride + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slot = block * block_stride + kv_head * cache_head_stride + (position % BLOCK_SIZE) * slot_stride
        kv_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + slot[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        if SOFT_CAP_LOG2E is not None:
            scores = capped(scores, SOFT_CAP_LOG2E)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        factor = tl.exp2(peak - new_peak)
        total = total * factor + tl.sum(weights, 1)
        v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=kv_mask, other=0.0)
        acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    row = (sequence * tl.num_programs(1) * GROUP + head) * num_splits + split
    tl.store(partial_ptr + row[:, None] * HEAD_DIM + d[None, :], acc / divisor[:, None], mask=q_mask)
    tl.store(lse_ptr + row, tl.where(seen, peak + tl.log2(divisor), float("-inf")), mask=g < GROUP)


@triton.jit
def decode_merge_kernel(
    partial_ptr,  # float32 [B, Hq, splits, D]
    lse_ptr,  # float32 [B, Hq, splits]
    out_ptr,  # [B, Hq, D]
    num_splits,
    SPLITS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """One program: one query head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    d = tl.arange(0, DIM_PADDED)
    lse = tl.load(lse_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    mask = (split < num_splits)[:, None] & (d < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (row * num_splits + split)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def paged_decode(
    q: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor,
) -> None:
    """Fills out [B, Hq, D]."""
    batch, num_heads, head_dim = q.shape
    num_splits = max(1, triton.cdiv(block_tables.shape[1] * kv.block_size, _SPLIT_TOKENS))
    if batch == 0:
        return
    partial = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device)
    group = num_heads // kv.num_heads
    dim_padded = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    keys = max(_MIN_DOT, min(_KEYS, _KEYS * _KEY_BYTES // (dim_padded * q.element_size())))
    decode_split_kernel[(batch, kv.num_heads, num_splits)](
        *(q, kv.k, kv.v, block_tables, context_lens.contiguous(), partial, lse, scale * _LOG2_E),
        *(q.stride(0), q.stride(1), *kv.k.stride()[:3], block_tables.stride(0), num_splits),
        GROUP=group,
        GROUP_PADDED=max(_MIN_DOT, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=kv.block_size,
        SPLIT_TOKENS=_SPLIT_TOKENS,
        KEYS=keys,
        WINDOW=sliding_window,
        SOFT_CAP_LOG2E=None if soft_cap is None else soft_cap * _LOG2_E,
        num_warps=4,
    )
    decode_merge_kernel[(batch * num_heads,)](
        *(partial, lse, out, num_splits),
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        num_warps=1,
    )
