"""Writes new tokens' K and V into their slots of the paged cache."""

from __future__ import annotations

import torch

from kernels.checks import check_cache, check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Copies token t to slot `slot_mapping[t]` = block * block_size + offset; a negative slot is skipped.

    k, v: [T, Hkv, D]. k_cache, v_cache: [N, Hkv, block_size, D], any strides but the last. slot_mapping: int64 [T],
    in which no slot occurs twice.
    Raises ValueError or TypeError for shapes and dtypes, IndexError (CPU only) for a slot outside the cache.
    """
    check_shape("k_cache", k_cache, (None, None, None, None))
    check_shape("k", k, (None, k_cache.shape[1], k_cache.shape[3]))
    check_shape("v", v, tuple(k.shape))
    check_rows("k", k)
    check_rows("v", v)
    check_dtype("v", v, k.dtype)
    check_cache(k, k_cache, v_cache)
    check_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    run = implementation("kv_write", "kv_write", k, backend)
    run(k, v, k_cache, v_cache, slot_mapping)
