"""What the two attention references share."""

from __future__ import annotations

import torch

from kernels.kv_cache import PagedKV
from kernels.reference.kv_formats import dequantised
from kernels.reference.precision import widened


def gather_context(kv: PagedKV, block_table: torch.Tensor, context_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the first `context_len` tokens of a sequence, [Hkv, context_len, D] each, widened.

    block_table: [M]. Raises IndexError for a block outside the cache.
    """
    used = block_table[: -(-context_len // kv.block_size)].long()
    if used.numel() * kv.block_size < context_len or bool(((used < 0) | (used >= kv.num_blocks)).any()):
        raise IndexError(
            f"block table {used.tolist()} for {context_len} tokens leaves the cache of {kv.num_blocks} blocks"
        )

    def tokens(cache: torch.Tensor) -> torch.Tensor:
        """[N, Hkv, block_size, *] -> [Hkv, context_len, *]."""
        return cache.index_select(0, used).transpose(0, 1).flatten(1, 2)[:, :context_len]

    k, v = tokens(kv.k), tokens(kv.v)
    if kv.k_scales is None or kv.v_scales is None:
        return widened(k), widened(v)
    return dequantised(k, tokens(kv.k_scales)), dequantised(v, tokens(kv.v_scales))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Causal attention of a context's last n tokens. q: [n, Hq, D]; k, v: [Hkv, c, D], c >= n. Returns [n, Hq, D].

    Keys that no query sees are left out before the products: what they hold cannot matter.
    """
    num_new, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = k.shape
    window = context_len if sliding_window is None else sliding_window
    first = max(0, context_len - num_new - window + 1)
    k, v = k[:, first:], v[:, first:]
    grouped = widened(q).reshape(num_new, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ k.unsqueeze(1).transpose(-1, -2) * scale
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh() * soft_cap
    position = torch.arange(context_len - num_new, context_len, device=q.device)[:, None]
    key = torch.arange(first, context_len, device=q.device)[None, :]
    hidden = (key > position) | (key <= position - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(num_new, num_heads, head_dim)
