"""CPU implementation of kernels/kv_write.py: rowwise.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import OK, cache_of, dtype_code, heads_of, library
from kernels.kv_cache import PagedKV


def kv_write(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Writes into `kv`. Raises IndexError for a slot outside them."""
    slot_mapping = slot_mapping.contiguous()
    bad = library().kv_write(
        dtype_code(k),
        heads_of(k),
        heads_of(v),
        cache_of(kv),
        slot_mapping.data_ptr(),
        torch.get_num_threads(),
    )
    if bad != OK:
        raise IndexError(
            f"slot {int(slot_mapping[bad])} of token {bad} lies outside the cache "
            f"of {kv.num_blocks} x {kv.block_size} slots"
        )
