"""CPU implementation of kernels/kv_write.py: rowwise.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import OK, cache_of, dtype_code, heads_of, library


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes into k_cache and v_cache [N, Hkv, block_size, D]. Raises IndexError for a slot outside them."""
    slot_mapping = slot_mapping.contiguous()
    bad = library().kv_write(
        dtype_code(k),
        heads_of(k),
        heads_of(v),
        cache_of(k_cache, v_cache),
        slot_mapping.data_ptr(),
        torch.get_num_threads(),
    )
    if bad != OK:
        num_blocks, _, block_size, _ = k_cache.shape
        raise IndexError(
            f"slot {int(slot_mapping[bad])} of token {bad} lies outside the cache of {num_blocks} x {block_size} slots"
        )
