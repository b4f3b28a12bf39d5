"""Reference of kernels/kv_write.py."""

from __future__ import annotations

import torch

from kernels.kv_cache import PagedKV
from kernels.reference.kv_formats import quantised


def kv_write(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Writes into `kv`. Raises IndexError for a slot outside them."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    if bool((slots >= kv.num_blocks * kv.block_size).any()):
        raise IndexError(f"slot {int(slots.max())} lies outside the cache of {kv.num_blocks} x {kv.block_size} slots")
    blocks, offsets = slots // kv.block_size, slots % kv.block_size
    for rows, cache, scales in ((k[kept], kv.k, kv.k_scales), (v[kept], kv.v, kv.v_scales)):
        if scales is None:
            cache[blocks, :, offsets] = rows.to(cache.dtype)
        else:
            cache[blocks, :, offsets], scales[blocks, :, offsets] = quantised(rows, cache.dtype)
