from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_cache import QUANTISED_DTYPES, PagedKV
from kernels.kv_write import kv_write
from tests.kernels.backends import every_backend, using
from tests.kernels.kv_formats import FP8_VALUES, bytes_of, expected_rows, quantised_cache

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


every_quantised_dtype = pytest.mark.parametrize("kv_dtype", QUANTISED_DTYPES, ids=str)


def write(implementation: str, rows: torch.Tensor, kv: PagedKV, slots: list[int]) -> None:
    """K is `rows` [T, Hkv, D], V is -2 `rows`."""
    with using(implementation) as backend:
        kv_write(rows, rows * -2, kv, torch.tensor(slots), backend=backend)


@every_backend
@every_quantised_dtype
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_quantised_rows_are_rounded_to_even_under_a_scale_of_their_own(
    implementation: str, kv_dtype: torch.dtype, data: st.DataObject
) -> None:
    head_dim, dtype = (
        data.draw(st.sampled_from([4, 20, 64])),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    sizes = 10.0 ** torch.randint(-12, 9, (5, 3, 1), generator=generator)
    rows = (torch.randn(5, 3, head_dim, generator=generator) * sizes).to(dtype)
    slots = data.draw(st.permutations([0, 15, 16, 33, 95]))
    kv = quantised_cache(NUM_BLOCKS, 3, 16, head_dim, kv_dtype)
    before = bytes_of(kv.k).copy()
    write(implementation, rows, kv, slots)
    for cache, scales, given_rows in ((kv.k, kv.k_scales, rows), (kv.v, kv.v_scales, rows * -2)):
        assert scales is not None
        stored, expected_scales = expected_rows(given_rows, kv_dtype)
        blocks, offsets = torch.tensor(slots) // 16, torch.tensor(slots) % 16
        assert np.array_equal(bytes_of(cache)[blocks, :, offsets], stored)
        assert np.array_equal(scales[blocks, :, offsets].numpy(), expected_scales)
        untouched = torch.ones(NUM_BLOCKS, 16, dtype=torch.bool)
        untouched[blocks, offsets] = False
        assert scales.transpose(1, 2)[untouched].isnan().all()
        assert np.array_equal(
            bytes_of(cache).swapaxes(1, 2)[untouched.numpy()], before.swapaxes(1, 2)[untouched.numpy()]
        )


@every_backend
def test_ties_and_every_fp8_value(implementation: str) -> None:
    """A row with a largest element of 448 (127 in int8) has scale 1: it is stored as it is, rounded."""
    values = torch.from_numpy(FP8_VALUES)
    middles = (values[1:] + values[:-1]) / 2
    row = torch.cat((values, -values, middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1])))
    for kv_dtype, rows in ((torch.float8_e4m3fn, row), (torch.int8, torch.arange(-127, 127.5, 0.5))):
        kv = quantised_cache(1, 1, 1, len(rows), kv_dtype)
        write(implementation, rows[None, None], kv, [0])
        stored, scales = expected_rows(rows, kv_dtype)
        assert np.array_equal(bytes_of(kv.k)[0, 0, 0], stored)
        assert kv.k_scales is not None
        assert kv.k_scales.flatten().tolist() == [1.0] == scales.flatten().tolist()


@every_backend
@every_quantised_dtype
def test_odd_rows_concern_their_own_slot_alone(implementation: str, kv_dtype: torch.dtype) -> None:
    """Zeros, numbers too small for a scale, the largest float, infinities and NaN between two ordinary rows."""
    rows = torch.randn(8, 1, 20)
    rows[1], rows[2] = 0.0, 2.0**-110
    rows[3, 0, 7], rows[4, 0, 8], rows[5, 0, 9] = 3e38, torch.inf, torch.nan
    rows[6, 0, 0], rows[6, 0, 19] = torch.nan, -torch.inf
    kv = quantised_cache(1, 1, 8, 20, kv_dtype)
    write(implementation, rows, kv, list(range(8)))
    stored, scales = expected_rows(rows[:, 0], kv_dtype)
    assert np.array_equal(bytes_of(kv.k)[0, 0], stored)
    assert kv.k_scales is not None
    assert np.array_equal(kv.k_scales[0, 0].numpy(), scales, equal_nan=True)
    assert scales[1] == scales[2] == 0
    assert np.isnan(scales).tolist() == [False, False, False, False, True, True, True, False]


@every_backend
@pytest.mark.parametrize("head_dim", [4, 20, 64])
def test_float32_rows_are_rounded_to_even_in_a_bfloat16_cache(implementation: str, head_dim: int) -> None:
    """Numbers of all sizes; halfway between two bfloat16 numbers, the lower one even and odd; what leaves the range."""
    rows = torch.randn(4, 2, head_dim) * 10.0 ** torch.randint(-12, 9, (4, 2, 1))
    rows[1, 0, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    rows[2, 1, :4] = torch.tensor([3.4e38, torch.inf, torch.nan, 2**-133])
    kv = PagedKV(*torch.full((NUM_BLOCKS, 2, 2, 16, head_dim), 85.0, dtype=torch.bfloat16).unbind(1))
    slots = torch.tensor([95, 0, 17, 33])
    write(implementation, rows, kv, slots.tolist())
    for cache, given_rows in ((kv.k, rows), (kv.v, rows * -2)):
        expected = torch.full_like(cache, 85.0)
        expected[slots // 16, :, slots % 16] = given_rows.bfloat16()
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
    assert kv.k[0, 0, 0, :3].tolist() == [1.0, 1 + 2**-6, -1.0]


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
