"""Writes new tokens' K and V into their slots of the paged cache."""

from __future__ import annotations

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation
from kernels.kv_cache import PagedKV


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: PagedKV,
    slot_mapping: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Stores token t in slot `slot_mapping[t]` = block * block_size + offset; a negative slot is skipped.

    k, v: [T, Hkv, D] of the cache's dtype, of float32 where it is bfloat16 (rounded to even), or of any float where it
    is quantised. slot_mapping: int64 [T], in which no slot occurs twice.
    A quantised cache stores each row [D] in float32 arithmetic as round_to_even(x * (limit / peak)) and the scale
    peak / limit, peak = max |x|: on every device the same bytes. Rows of nothing but (nearly) zeros get scale 0; rows
    with an infinity or NaN get scale NaN, which is what attention makes of them in any dtype.
    Raises ValueError or TypeError for shapes and dtypes, IndexError (CPU only) for a slot outside the cache.
    """
    check_shape("k", k, (None, kv.num_heads, kv.head_dim))
    check_shape("v", v, tuple(k.shape))
    for name, rows in (("k", k), ("v", v)):
        kv.check_dtype(name, rows)
        check_rows(name, rows)
    check_dtype("v", v, k.dtype)
    check_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    run = implementation("kv_write", "kv_write", k, backend)
    run(k, v, kv, slot_mapping)
