"""Reference of kernels/paged_decode.py: one sequence after the other, plain softmax."""

from __future__ import annotations

import torch

from kernels.kv_cache import PagedKV
from kernels.reference.attention import attend, gather_context


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
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            out[row].zero_()
            continue
        k, v = gather_context(kv, block_tables[row], context_len)
        out[row] = attend(q[row].unsqueeze(0), k, v, scale, sliding_window, soft_cap)[0]
