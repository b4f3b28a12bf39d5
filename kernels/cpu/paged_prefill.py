"""CPU implementation of kernels/paged_prefill.py: paged_prefill.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import MAX_HEAD_DIM, OK, cache_of, context_of, dtype_code, heads_of, library, scoring_of
from kernels.kv_cache import PagedKV
from kernels.reference import paged_prefill as reference


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
    """Fills out [T, Hq, D]. Raises IndexError for a sequence that leaves its tokens, block table or the cache."""
    if q.shape[2] > MAX_HEAD_DIM:
        return reference.paged_prefill(
            *(q, kv, block_tables, cu_seqlens, context_lens, scale, sliding_window, soft_cap, out)
        )
    context_lens, cu_seqlens = context_lens.contiguous(), cu_seqlens.contiguous()
    bad = library().paged_prefill(
        dtype_code(q),
        heads_of(q),
        cache_of(kv),
        context_of(block_tables, context_lens),
        cu_seqlens.data_ptr(),
        scoring_of(scale, sliding_window, soft_cap),
        heads_of(out),
        torch.get_num_threads(),
    )
    if bad != OK:
        raise IndexError(
            f"sequence {bad} leaves its context, its block table or the cache of {kv.num_blocks} blocks, "
            f"or cu_seqlens do not run from 0 to {q.shape[0]}"
        )
