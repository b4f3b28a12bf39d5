from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_cache import PagedKV
from kernels.kv_write import kv_write
from tests.kernels.backends import every_backend, using

NUM_BLOCKS = 6


def block_major_cache(heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((NUM_BLOCKS, 3, 2, heads, block_size, head_dim), torch.nan, dtype=dtype)


@every_backend
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(implementation: str, data: st.DataObject) -> None:
    heads, block_size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([8, 16, 32]))
    head_dim, dtype = data.draw(st.sampled_from([4, 64])), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    distinct = st.lists(st.integers(0, NUM_BLOCKS * block_size - 1), unique=True, max_size=40)
    slots = data.draw(distinct.flatmap(lambda drawn: st.permutations([*drawn, -1, -7])))
    cache = block_major_cache(heads, block_size, head_dim, dtype)
    wide = torch.arange(len(slots) * (2 * heads + 1) * head_dim, dtype=torch.float32)
    wide = wide.reshape(len(slots), 2 * heads + 1, head_dim).to(dtype)
    k, v = wide[:, :heads], wide[:, heads : 2 * heads]

    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected[block, 1, 0, :, offset] = k[token]
            expected[block, 1, 1, :, offset] = v[token]

    with using(implementation) as backend:
        kv_write(k, v, PagedKV(cache[:, 1, 0], cache[:, 1, 1]), torch.tensor(slots, dtype=torch.int64), backend=backend)
    assert torch.equal(cache.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@every_backend
def test_a_slot_outside_the_cache_is_refused_and_nothing_written(implementation: str) -> None:
    cache = block_major_cache(2, 16, 64, torch.float32)
    k = torch.ones(2, 2, 64)
    with using(implementation) as backend, pytest.raises(IndexError, match=r"slot 96 .*outside the cache of 6 x 16"):
        kv_write(k, k, PagedKV(cache[:, 0, 0], cache[:, 0, 1]), torch.tensor([3, 96]), backend=backend)
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("k_shape", "slots", "error", "message"),
    [
        ((2, 3, 64), torch.zeros(2, dtype=torch.int64), ValueError, "k has"),
        ((2, 2, 64), torch.zeros(3, dtype=torch.int64), ValueError, r"slot_mapping has shape \(3,\), expected \(2\)"),
        ((2, 2, 64), torch.zeros(2, dtype=torch.int32), TypeError, "slot_mapping has dtype torch.int32"),
    ],
)
def test_wrong_arguments_are_named(
    k_shape: tuple[int, ...], slots: torch.Tensor, error: type[Exception], message: str
) -> None:
    cache = block_major_cache(2, 16, 64, torch.float32)
    with pytest.raises(error, match=message):
        kv_write(torch.zeros(k_shape), torch.zeros(k_shape), PagedKV(cache[:, 0, 0], cache[:, 0, 1]), slots)
