"""The same attention by others: torch's SDPA always, FlashAttention and FlashInfer where they are installed.

SDPA and FlashAttention get contexts that lie in one piece, which is easier than blocks; FlashInfer reads our blocks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.kv_cache import PagedKV

WORKSPACE_BYTES = 256 << 20  # what FlashInfer asks for


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Inputs of an attention case: `num_new` queries of each sequence, all contexts `context` long.

    q: [B * num_new, Hq, D]; cache: [N, 2, Hkv, block_size, D], which kv views; block_tables: int32 [B, M].
    """

    q: torch.Tensor
    cache: torch.Tensor
    kv: PagedKV
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    num_new: int
    context: int
    scale: float

    @property
    def sequences(self) -> int:
        return self.block_tables.shape[0]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q [B, n, Hq, D], k [B, c, Hkv, D], v) with each context in one piece."""
        k, v = (self._gathered(cache) for cache in (self.kv.k, self.kv.v))
        return self.q.view(self.sequences, self.num_new, *self.q.shape[1:]), k, v

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        blocks = cache[self.block_tables.long()]  # [B, M, Hkv, block_size, D]
        tokens = blocks.transpose(2, 3).flatten(1, 2)
        return tokens[:, : self.context].contiguous()


def decode_peers(paged: Paged) -> dict[str, Callable[[], object]]:
    peers = {"sdpa": _sdpa(paged)}
    if _usable("flash_attn", paged):
        peers["flash_attn"] = _flash_attn(paged)
    if _usable("flashinfer", paged):
        peers["flashinfer"] = _flashinfer_decode(paged)
    return peers


def prefill_peers(paged: Paged) -> dict[str, Callable[[], object]]:
    peers = {"sdpa": _sdpa(paged)}
    if _usable("flash_attn", paged):
        peers["flash_attn"] = _flash_attn(paged)
    if _usable("flashinfer", paged):
        peers["flashinfer"] = _flashinfer_prefill(paged)
    return peers


def _usable(module: str, paged: Paged) -> bool:
    return paged.q.is_cuda and importlib.util.find_spec(module) is not None


def _sdpa(paged: Paged) -> Callable[[], object]:
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in paged.contiguous())
    causal = paged.num_new == paged.context and paged.num_new > 1
    mask = None
    if not causal and paged.num_new > 1:  # SDPA's own causal mask is aligned to the first key
        mask = torch.ones(paged.num_new, paged.context, dtype=torch.bool, device=q.device)
        mask = mask.tril(paged.context - paged.num_new)
    return partial(
        F.scaled_dot_product_attention,
        *(q, k, v),
        attn_mask=mask,
        is_causal=causal,
        scale=paged.scale,
        enable_gqa=True,
    )


def _flash_attn(paged: Paged) -> Callable[[], object]:
    """Its causal mask is aligned to the last key, as ours."""
    q, k, v = paged.contiguous()
    run: Any = importlib.import_module("flash_attn").flash_attn_with_kvcache
    return partial(run, q, k, v, cache_seqlens=paged.context_lens, softmax_scale=paged.scale, causal=True)


def _flashinfer_decode(paged: Paged) -> Callable[[], object]:
    flashinfer: Any = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(paged), "HND")
    wrapper.plan(*_page_lists(paged), *_plan_sizes(paged), q_data_type=paged.q.dtype, sm_scale=paged.scale)
    return partial(wrapper.run, paged.q, paged.cache)


def _flashinfer_prefill(paged: Paged) -> Callable[[], object]:
    flashinfer: Any = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(paged), "HND")
    starts = _steps(paged, paged.num_new)
    wrapper.plan(
        *(starts, *_page_lists(paged), *_plan_sizes(paged)),
        causal=True,
        q_data_type=paged.q.dtype,
        sm_scale=paged.scale,
    )
    return partial(wrapper.run, paged.q, paged.cache)


def _workspace(paged: Paged) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=paged.q.device)


def _page_lists(paged: Paged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first entry of each sequence, block ids, tokens in each last block)."""
    last = (paged.context - 1) % paged.kv.block_size + 1
    return (
        _steps(paged, paged.block_tables.shape[1]),
        paged.block_tables.flatten(),
        torch.full_like(paged.context_lens, last),
    )


def _plan_sizes(paged: Paged) -> tuple[int, int, int, int]:
    return paged.q.shape[1], paged.kv.num_heads, paged.q.shape[2], paged.kv.block_size


def _steps(paged: Paged, size: int) -> torch.Tensor:
    return torch.arange(paged.sequences + 1, dtype=torch.int32, device=paged.q.device) * size
