"""Triton implementation of kernels/paged_decode.py: flash decoding (Dao et al., 2023) over a paged cache.

A sequence's context is cut into splits of a fixed number of tokens, at places that depend on nothing but the position,
so a sequence's result does not depend on what else is in the batch. A grid of fixed size walks the list of all work,
(sequence, split, kv head): one long context among many short ones keeps every multiprocessor busy, and a short one
costs no programs that find nothing to do. Each program derives the list from the context lengths, which therefore never
leave the device. A second kernel merges each sequence's splits by their log-sum-exps.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PagedKV
from kernels.triton.device import num_multiprocessors
from kernels.triton.soft_cap import capped

_LOG2_E = math.log2(math.e)
_SPLIT_TOKENS = 512
_KEYS = 64  # per loop iteration
_KEY_BYTES = 256  # a longer head takes fewer keys: consumer GPUs have 99 KiB of shared memory, and registers spill
_MIN_DOT = 16  # smallest dimension of a tl.dot
_MIN_BATCH = 16  # smaller batches are compiled as one of this size
_PROGRAMS_PER_MULTIPROCESSOR = 4  # so that some compute while others wait for memory
_MERGED_SPLITS = 8  # per loop iteration


@triton.jit
def first_split(context_len, SPLIT_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """The split that holds the first key which the window shows."""
    first = context_len * 0
    if WINDOW is not None:
        first = tl.maximum(context_len - WINDOW, 0) // SPLIT_TOKENS
    return first


@triton.jit
def count_splits(context_len, SPLIT_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """How many splits a sequence has, each with a key that it sees; 0 for a padding row."""
    return tl.cdiv(context_len, SPLIT_TOKENS) - first_split(context_len, SPLIT_TOKENS, WINDOW)


@triton.jit
def attend_split(
    q,  # [GROUP_PADDED, DIM_PADDED]
    k_ptr,  # of this kv head: [N, block_size, D]
    v_ptr,  # likewise
    k_scales_ptr,  # of all heads: [N, Hkv, block_size]; None unless quantised
    v_scales_ptr,  # likewise
    table_ptr,  # of this sequence: [M]
    begin,
    end,
    scale_log2e,
    block_stride,
    slot_stride,
    scale_block_stride,
    scales_offset,  # of this kv head
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SOFT_CAP_LOG2E: tl.constexpr,
):
    """Online softmax over the keys begin .. end - 1: (peak, total, accumulated values), peaks and scores in log2.

    Scales of a quantised cache multiply scores and weights, [GROUP, KEYS] each, where K and V are [KEYS, D].
    """
    d = tl.arange(0, DIM_PADDED)
    peak = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        valid = position < end
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slot = block * block_stride + (position % BLOCK_SIZE) * slot_stride
        kv_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + slot[:, None] + d[None, :], mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2e
        scales_at = block * scale_block_stride + scales_offset + position % BLOCK_SIZE
        if k_scales_ptr is not None:
            scores *= tl.load(k_scales_ptr + scales_at, mask=valid, other=0.0)[None, :]
        if SOFT_CAP_LOG2E is not None:
            scores = capped(scores, SOFT_CAP_LOG2E)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        factor = tl.exp2(peak - new_peak)
        total = total * factor + tl.sum(weights, 1)
        if v_scales_ptr is not None:
            weights *= tl.load(v_scales_ptr + scales_at, mask=valid, other=0.0)[None, :]
        v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=kv_mask, other=0.0)
        acc = acc * factor[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def decode_split_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [N, Hkv, block_size, D]
    v_ptr,  # likewise
    k_scales_ptr,  # float32 [N, Hkv, block_size] of a quantised cache, else None
    v_scales_ptr,  # likewise
    table_ptr,  # [B, M]
    len_ptr,  # [B]
    partial_ptr,  # float32 [B, Hq, max_splits, D]
    lse_ptr,  # float32 [B, Hq, max_splits]: log2 of the sum of exp2 of the split's scores
    scale_log2e,
    batch,
    num_kv_heads,
    max_splits,
    q_stride,
    q_head_stride,
    block_stride,
    cache_head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    BATCH_PADDED: tl.constexpr,
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
    """Program p of P: items p, p + P, ... An item is a split of a sequence, for all query heads of one kv head."""
    row = tl.arange(0, BATCH_PADDED)
    lengths = tl.load(len_ptr + row, mask=row < batch, other=0)
    ends = tl.cumsum(count_splits(lengths, SPLIT_TOKENS, WINDOW), 0)  # splits of this sequence and those before it
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, DIM_PADDED)
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), tl.max(ends, 0) * num_kv_heads, tl.num_programs(0)):
        kv_head = (item % num_kv_heads).to(tl.int64)  # neighbours read neighbouring heads of a block
        ordinal = item // num_kv_heads
        sequence = tl.sum((ends <= ordinal).to(tl.int32), 0).to(tl.int64)
        split = ordinal - tl.max(tl.where(ends <= ordinal, ends, 0), 0)

        context_len = tl.load(len_ptr + sequence)
        begin = (first_split(context_len, SPLIT_TOKENS, WINDOW) + split) * SPLIT_TOKENS
        end = tl.minimum(begin + SPLIT_TOKENS, context_len)
        if WINDOW is not None:
            begin = tl.maximum(begin, context_len - WINDOW)
        head = kv_head * GROUP + g
        q = tl.load(q_ptr + sequence * q_stride + head[:, None] * q_head_stride + d[None, :], mask=q_mask, other=0.0)
        peak, total, acc = attend_split(
            q,
            k_ptr + kv_head * cache_head_stride,
            v_ptr + kv_head * cache_head_stride,
            k_scales_ptr,
            v_scales_ptr,
            table_ptr + sequence * table_stride,
            begin,
            end,
            scale_log2e,
            block_stride,
            slot_stride,
            scale_block_stride,
            kv_head * scale_head_stride,
            GROUP_PADDED,
            HEAD_DIM,
            DIM_PADDED,
            BLOCK_SIZE,
            KEYS,
            SOFT_CAP_LOG2E,
        )
        to = (sequence * num_kv_heads * GROUP + head) * max_splits + split
        tl.store(partial_ptr + to[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=q_mask)
        tl.store(lse_ptr + to, peak + tl.log2(total), mask=g < GROUP)


@triton.jit
def decode_merge_kernel(
    partial_ptr,  # float32 [B, Hq, max_splits, D]
    lse_ptr,  # float32 [B, Hq, max_splits]
    len_ptr,  # [B]
    out_ptr,  # [B, Hq, D]
    num_heads,
    max_splits,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,  # per loop iteration
    WINDOW: tl.constexpr,
):
    """One program: one query head of one sequence; zeros for a padding row."""
    row = tl.program_id(0).to(tl.int64)
    num_splits = count_splits(tl.load(len_ptr + row // num_heads), SPLIT_TOKENS, WINDOW)
    d = tl.arange(0, DIM_PADDED)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        at = row * max_splits + split
        lse = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        factor = tl.exp2(peak - new_peak)
        total = total * factor + tl.sum(weights, 0)
        mask = (split < num_splits)[:, None] & (d < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        acc = acc * factor + tl.sum(partial * weights[:, None], 0)
        peak = new_peak
    out = acc / tl.where(num_splits > 0, total, 1.0)
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
    max_splits = _max_splits(block_tables.shape[1] * kv.block_size, sliding_window)
    if batch == 0:
        return
    context_lens = context_lens.contiguous()
    partial = torch.empty((batch, num_heads, max_splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, num_heads, max_splits), dtype=torch.float32, device=q.device)
    group = num_heads // kv.num_heads
    dim_padded = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    keys = max(_MIN_DOT, min(_KEYS, _KEYS * _KEY_BYTES // (dim_padded * q.element_size())))
    num_programs = min(batch * kv.num_heads * max_splits, _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(q.device))
    decode_split_kernel[(num_programs,)](
        *(q, kv.k, kv.v, kv.k_scales, kv.v_scales, block_tables, context_lens, partial, lse),
        *(scale * _LOG2_E, batch, kv.num_heads, max_splits),
        *(q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.scale_strides, block_tables.stride(0)),
        BATCH_PADDED=max(_MIN_BATCH, triton.next_power_of_2(batch)),
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
        *(partial, lse, context_lens, out, num_heads, max_splits),
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        SPLIT_TOKENS=_SPLIT_TOKENS,
        SPLITS=_MERGED_SPLITS,
        WINDOW=sliding_window,
        num_warps=1,
    )


def _max_splits(max_context: int, sliding_window: int | None) -> int:
    """How many splits a sequence can have: a window of w tokens may touch one more than w tokens fill."""
    splits = max(1, -(-max_context // _SPLIT_TOKENS))
    return splits if sliding_window is None else min(splits, (sliding_window - 2) // _SPLIT_TOKENS + 2)
