"""Attention of one new token a sequence over its paged KV cache: the decode step's attention."""

from __future__ import annotations

import torch

from kernels.checks import check_context, check_scoring
from kernels.dispatch import Backend, implementation
from kernels.kv_cache import PagedKV


def paged_decode(
    q: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """softmax(scale * q K^T) V for B sequences with one query each.

    q: [B, Hq, D]; query head h reads kv head h // (Hq / Hkv).
    kv: the layer's cache, in which the token's own K and V are already written.
    block_tables: int32 [B, M]; entries past a sequence's context are never read.
    context_lens: int32 [B], tokens to attend to, the new one included; 0 (a padding row) gives zeros.
    sliding_window: only the latest so many tokens are attended to, the new one included; earlier blocks are not read.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    Returns [B, Hq, D] in q's dtype; sums are float32 (float64 for float64 inputs).
    Raises ValueError or TypeError for shapes, dtypes and a window or cap not above 0, IndexError (CPU only) for a
    block outside the cache.
    """
    kv.check_query(q)
    check_context(block_tables, context_lens, q.shape[0])
    check_scoring(sliding_window, soft_cap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run = implementation("paged_decode", "paged_decode", q, backend)
    run(q, kv, block_tables, context_lens, scale, sliding_window, soft_cap, out)
    return out
