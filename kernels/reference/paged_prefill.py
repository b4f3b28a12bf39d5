"""Reference of kernels/paged_prefill.py: one sequence after the other, plain masked softmax."""

from __future__ import annotations

import itertools

import torch

from kernels.kv_cache import PagedKV
from kernels.reference.attention import attend, gather_context


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
    """Fills out [T, Hq, D]."""
    bounds = itertools.pairwise(cu_seqlens.tolist())
    for row, ((start, end), context_len) in enumerate(zip(bounds, context_lens.tolist(), strict=True)):
        if start < end:
            k, v = gather_context(kv, block_tables[row], context_len)
            out[start:end] = attend(q[start:end], k, v, scale, sliding_window, soft_cap)
