"""Reference of kernels/kv_write.py."""

from __future__ import annotations

import torch


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes into k_cache and v_cache [N, Hkv, block_size, D]. Raises IndexError for a slot outside them."""
    num_blocks, _, block_size, _ = k_cache.shape
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    if bool((slots >= num_blocks * block_size).any()):
        raise IndexError(f"slot {int(slots.max())} lies outside the cache of {num_blocks} x {block_size} slots")
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k[kept]
    v_cache[blocks, :, offsets] = v[kept]
