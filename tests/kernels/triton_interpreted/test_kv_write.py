from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.kv_cache import QUANTISED_DTYPES, PagedKV
from kernels.kv_write import kv_write
from tests.kernels.kv_formats import bytes_of, expected_rows, quantised_cache
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


@given(head_dim=st.sampled_from([4, 20, 64]), seed=st.integers(0, 2**16))
def test_float32_rows_are_rounded_to_even_in_a_bfloat16_cache(head_dim: int, seed: int) -> None:
    rows = torch.randn(3, 3, head_dim, generator=torch.Generator().manual_seed(seed))
    rows[0, 0, :2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # halfway
    kv = PagedKV(*torch.zeros(2, 2, 3, 8, head_dim, dtype=torch.bfloat16).unbind(1))
    slots = torch.tensor([3, 0, 15])
    kv_write(rows, rows * -2, kv, slots, backend="triton")
    assert torch.equal(kv.k[slots // 8, :, slots % 8], rows.bfloat16())
    assert torch.equal(kv.v[slots // 8, :, slots % 8], (rows * -2).bfloat16())


@pytest.mark.parametrize("kv_dtype", QUANTISED_DTYPES, ids=str)
@given(head_dim=st.sampled_from([4, 20, 64]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**16))
def test_quantised_rows_have_the_same_bytes_as_elsewhere(
    kv_dtype: torch.dtype, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    """Ordinary rows of all sizes; row 0 has nothing, row 1 too little for a scale, row 2 an infinity, row 3 a NaN."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 4, (9, 3, 1), generator=generator)
    rows = (torch.randn(9, 3, head_dim, generator=generator) * sizes).to(dtype)
    rows[0], rows[1] = 0.0, 2.0**-110
    rows[2, 0, 1], rows[3, 1, 3] = torch.inf, torch.nan
    kv = quantised_cache(2, 3, 8, head_dim, kv_dtype)
    slots = torch.tensor([3, 0, 15, 9, 4, 7, 8, 1, 2])
    kv_write(rows, rows * -2, kv, slots, backend="triton")
    for cache, scales, given_rows in ((kv.k, kv.k_scales, rows), (kv.v, kv.v_scales, rows * -2)):
        assert scales is not None
        stored, expected_scales = expected_rows(given_rows, kv_dtype)
        assert np.array_equal(bytes_of(cache)[slots // 8, :, slots % 8], stored)
        assert np.array_equal(scales[slots // 8, :, slots % 8].numpy(), expected_scales, equal_nan=True)
        assert scales[1, :, 5].isnan().all()
        assert np.array_equal(bytes_of(cache)[1, :, 5], bytes_of(torch.full((3, head_dim), 85.0).to(kv_dtype)))
