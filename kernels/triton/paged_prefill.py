"""Triton implementation of kernels/paged_prefill.py: flash attention (Dao et al., 2022) over paged contexts."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.kv_cache import PagedKV
from kernels.triton.soft_cap import capped

_LOG2_E = math.log2(math.e)
_ROW_BYTES = 256  # of a head, for which the tiles are meant
_MIN_DOT = 16  # smallest dimension of a tl.dot


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [N, Hkv, block_size, D]
    v_ptr,  # likewise
    k_scales_ptr,  # float32 [N, Hkv, block_size] of a quantised cache, else None
    v_scales_ptr,  # likewise
    table_ptr,  # [S, M]
    cu_ptr,  # [S + 1]
    len_ptr,  # [S]
    out_ptr,  # [T, Hq, D], contiguous
    scale_log2e,
    num_heads,
    q_stride,
    q_head_stride,
    block_stride,
    cache_head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # latest tokens that a query sees, or None: all
    SOFT_CAP_LOG2E: tl.constexpr,  # or None
):
    """One program: QUERIES new tokens of one sequence, one query head; idle when the sequence has fewer."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.load(cu_ptr + sequence)
    num_new = tl.load(cu_ptr + sequence + 1) - first
    if tile * QUERIES < num_new:
        num_before = tl.load(len_ptr + sequence) - num_new
        i, d = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIM_PADDED)
        q_mask = (i < num_new)[:, None] & (d < HEAD_DIM)[None, :]
        token = (first + i).to(tl.int64)
        q = tl.load(q_ptr + token[:, None] * q_stride + head * q_head_stride + d[None, :], mask=q_mask, other=0.0)

        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, DIM_PADDED], tl.float32)
        end = num_before + tl.minimum((tile + 1) * QUERIES, num_new)
        begin = 0
        if WINDOW is not None:
            begin = tl.maximum(num_before + tile * QUERIES - WINDOW + 1, 0)
        for start in range(begin, end, KEYS):
            position = start + tl.arange(0, KEYS)
            valid = position < end
            table_at = table_ptr + sequence * table_stride + position // BLOCK_SIZE
            block = tl.load(table_at, mask=valid, other=0).to(tl.int64)
            slot = block * block_stride + (head // GROUP) * cache_head_stride + (position % BLOCK_SIZE) * slot_stride
            kv_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + slot[:, None] + d[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2e
            scales_at = block * scale_block_stride + (head // GROUP) * scale_head_stride + position % BLOCK_SIZE
            if k_scales_ptr is not None:
                scores *= tl.load(k_scales_ptr + scales_at, mask=valid, other=0.0)[None, :]
            visible = (position[None, :] <= num_before + i[:, None]) & valid[None, :]
            if SOFT_CAP_LOG2E is not None:
                scores = capped(scores, SOFT_CAP_LOG2E)
            if WINDOW is not None:
                # queries past the last new token see its keys, so that none is without
                visible &= position[None, :] > tl.minimum(num_before + i[:, None], end - 1) - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            base = new_peak
            if WINDOW is not None:  # the last queries of a tile may see none of the first keys
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - base[:, None])
            factor = tl.exp2(peak - base)
            total = total * factor + tl.sum(weights, 1)
            if v_scales_ptr is not None:
                weights *= tl.load(v_scales_ptr + scales_at, mask=valid, other=0.0)[None, :]
            v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=kv_mask, other=0.0)
            acc = acc * factor[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            peak = new_peak

        to = out_ptr + (token[:, None] * num_heads + head) * HEAD_DIM + d[None, :]
        tl.store(to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask)


def tile(dtype: torch.dtype, dim_padded: int) -> tuple[int, int]:
    """(query tokens of a program, keys of a loop iteration): what spills no registers, with 8 warps.

    A longer head takes smaller tiles: consumer GPUs have 99 KiB of shared memory. float32 is computed without matrix
    units, from registers.
    """
    queries = 32 if dtype == torch.float32 else 128
    keys = 32 if torch.version.hip else 64
    shrink = triton.cdiv(dim_padded * dtype.itemsize, _ROW_BYTES)
    return max(_MIN_DOT, queries // shrink), max(_MIN_DOT, keys // shrink)


def paged_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: torch.Tensor,
) -> None:
    """Fills out [T, Hq, D]. The grid covers the case that one sequence owns all tokens: lengths stay on the device."""
    num_tokens, num_heads, head_dim = q.shape
    num_sequences = context_lens.shape[0]
    if num_tokens == 0:
        return
    dim_padded = max(_MIN_DOT, triton.next_power_of_2(head_dim))
    queries, keys = tile(q.dtype, dim_padded)
    prefill_kernel[(triton.cdiv(num_tokens, queries), num_heads, num_sequences)](
        *(q, kv.k, kv.v, kv.k_scales, kv.v_scales),
        *(block_tables, cu_seqlens.contiguous(), context_lens.contiguous(), out),
        *(scale * _LOG2_E, num_heads, q.stride(0), q.stride(1), *kv.k.stride()[:3], *kv.scale_strides),
        block_tables.stride(0),
        GROUP=num_heads // kv.num_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=kv.block_size,
        QUERIES=queries,
        KEYS=keys,
        WINDOW=sliding_window,
        SOFT_CAP_LOG2E=None if soft_cap is None else soft_cap * _LOG2_E,
        num_warps=8,
    )
