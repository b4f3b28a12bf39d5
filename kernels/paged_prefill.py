"""Causal attention of runs of new tokens over paged KV caches: whole prompts, chunks and single tokens alike."""

from __future__ import annotations

import torch

from kernels.checks import check_context, check_dtype, check_scoring, check_shape
from kernels.dispatch import Backend, implementation
from kernels.kv_cache import PagedKV


def paged_prefill(
    q: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Causal attention for S sequences whose new tokens lie one after the other in q.

    q: [T, Hq, D]; sequence s owns rows cu_seqlens[s] .. cu_seqlens[s + 1] - 1, the last tokens of its context.
    kv: the layer's cache, in which the new tokens' K and V are already written.
    block_tables: int32 [S, M]; entries past a sequence's context are never read.
    cu_seqlens: int32 [S + 1], from 0 to T. context_lens: int32 [S], each at least the sequence's new tokens.
    A token at position p attends to positions 0 .. p, with a sliding_window w only to the last w of them; blocks that
    no new token attends to are not read. soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    Returns [T, Hq, D] in q's dtype; sums are float32 (float64 for float64 inputs).
    Raises ValueError or TypeError for shapes, dtypes and a window or cap not above 0, IndexError (CPU only) for a
    block outside the cache.
    """
    kv.check_query(q)
    num_sequences = context_lens.shape[0]
    check_context(block_tables, context_lens, num_sequences)
    check_shape("cu_seqlens", cu_seqlens, (num_sequences + 1,))
    check_dtype("cu_seqlens", cu_seqlens, torch.int32)
    check_scoring(sliding_window, soft_cap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = implementation("paged_prefill", "paged_prefill", q, backend)
    run(q, kv, block_tables, cu_seqlens, context_lens, scale, sliding_window, soft_cap, out)
    return out
