"""CPU implementation of kernels/paged_decode.py: paged_decode.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import MAX_HEAD_DIM, OK, cache_of, context_of, dtype_code, heads_of, library, scoring_of
from kernels.kv_cache import PagedKV
from kernels.reference import paged_decode as reference


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
    """Fills out [B, Hq, D]. Raises IndexError for a context that leaves its block table or the cache."""
    if q.shape[2] > MAX_HEAD_DIM:
        return reference.paged_decode(q, kv, block_tables, context_lens, scale, sliding_window, soft_cap, out)
    context_lens = context_lens.contiguous()
    bad = library().paged_decode(
        dtype_code(q),
        heads_of(q),
        cache_of(kv),
        context_of(block_tables, context_lens),
        scoring_of(scale, sliding_window, soft_cap),
        heads_of(out),
        torch.get_num_threads(),
    )
    if bad != OK:
        raise IndexError(f"context of sequence {bad} leaves its block table or the cache of {kv.num_blocks} blocks")
