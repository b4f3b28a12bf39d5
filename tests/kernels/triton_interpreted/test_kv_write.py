from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.kv_cache import PagedKV
from kernels.kv_write import kv_write
from tests.kernels.triton_interpreted.precisions import DTYPES


@given(
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([4, 20, 64, 128]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    slots=st.lists(st.integers(0, 159), unique=True, max_size=10).flatmap(lambda s: st.permutations([*s, -1, -9])),
)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(
    heads: int, head_dim: int, block_size: int, dtype: torch.dtype, slots: list[int]
) -> None:
    cache = torch.full((160 // block_size, 2, 2, heads, block_size, head_dim), torch.nan, dtype=dtype)
    wide = torch.randn(len(slots), 2 * heads + 1, head_dim).to(dtype)
    k, v = wide[:, :heads], wide[:, heads : 2 * heads]
    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, 1, 0, :, slot % block_size] = k[token]
            expected[slot // block_size, 1, 1, :, slot % block_size] = v[token]
    kv_write(k, v, PagedKV(cache[:, 1, 0], cache[:, 1, 1]), torch.tensor(slots, dtype=torch.int64), backend="triton")
    assert torch.equal(cache.nan_to_num(-1.0), expected.nan_to_num(-1.0))
