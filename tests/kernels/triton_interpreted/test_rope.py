from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.rope import rope
from tests.kernels.cases import assert_close, float64
from tests.kernels.triton_interpreted.precisions import DTYPES


@given(
    positions=st.lists(st.integers(0, 49), max_size=6),
    q_heads=st.integers(1, 9),
    k_heads=st.integers(1, 4),
    half=st.sampled_from([1, 10, 32, 36, 64]),
    unrotated=st.sampled_from([0, 2, 32]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_each_pair_is_rotated_by_its_tokens_angle(
    positions: list[int], q_heads: int, k_heads: int, half: int, unrotated: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    heads = q_heads + k_heads
    qkv = torch.randn(len(positions), heads + k_heads, 2 * half + unrotated).to(dtype)
    angles = torch.rand(50, half) * 6
    cos, sin, before = angles.cos(), angles.sin(), float64(qkv)
    ids = torch.tensor(positions, dtype=torch.int64)
    rope(qkv[:, :q_heads], qkv[:, q_heads:heads], ids, cos, sin, backend="triton")
    first, second, rest = before[..., :half], before[..., half : 2 * half], before[..., 2 * half :]
    c, s = float64(cos[ids])[:, None], float64(sin[ids])[:, None]
    expected = np.concatenate((first * c - second * s, second * c + first * s, rest), axis=-1)
    assert_close(qkv[:, :heads], expected[:, :heads])
    assert np.array_equal(float64(qkv[:, heads:]), before[:, heads:])  # V is not rotated
