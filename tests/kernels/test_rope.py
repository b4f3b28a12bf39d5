from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import rope
from tests.kernels.backends import every_backend, using
from tests.kernels.cases import Array, assert_close, float64

NUM_POSITIONS = 50


def tables(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(NUM_POSITIONS, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def oracle(x: Array, cos: Array, sin: Array) -> Array:
    """Each pair (i, i + R/2) as a complex number, turned. x: [T, H, D]; cos, sin: [T, R/2]."""
    half = cos.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    return np.concatenate((turned.real, turned.imag, x[..., 2 * half :]), axis=-1)


@every_backend
@given(
    num_tokens=st.integers(0, 20),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 2)]),
    dims=st.sampled_from([(2, 2), (20, 20), (64, 64), (128, 128), (128, 96), (24, 6)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_rotates_in_place_within_a_fused_projection(
    implementation: str, num_tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """dims: of a head, and how many of them are rotated."""
    (q_heads, k_heads), (head_dim, rotary_dim) = heads, dims
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, q_heads + 2 * k_heads, head_dim, generator=generator).to(dtype)
    before = qkv.clone()
    q, k = qkv[:, :q_heads], qkv[:, q_heads : q_heads + k_heads]
    positions = torch.randint(0, NUM_POSITIONS, (num_tokens,), generator=generator)
    cos, sin = tables(rotary_dim)
    expected = oracle(float64(before[:, : q_heads + k_heads]), float64(cos[positions]), float64(sin[positions]))

    with using(implementation) as backend:
        rotated_q, rotated_k = rope(q, k, positions, cos, sin, backend=backend)

    assert rotated_q is q
    assert rotated_k is k
    assert_close(qkv[:, : q_heads + k_heads], expected)
    assert torch.equal(qkv[:, q_heads + k_heads :], before[:, q_heads + k_heads :])


@every_backend
@pytest.mark.parametrize("position", [-1, NUM_POSITIONS])
def test_a_position_outside_the_tables_is_refused(implementation: str, position: int) -> None:
    q = torch.ones(2, 1, 4)
    with using(implementation) as backend, pytest.raises(IndexError, match=rf"{position}.* 0 \.\. 49"):
        rope(q, q.clone(), torch.tensor([3, position]), *tables(4), backend=backend)
    assert q.eq(1).all()


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((2, 1, 5), (2, 1, 5), "q has head dimension 5, expected an even one"),
        ((2, 1, 4), (3, 1, 4), r"k has shape \(3, 1, 4\), expected \(2, \*, 4\)"),
        ((2, 1, 2), (2, 1, 2), "cos has 2 pairs, expected at most 1"),
    ],
)
def test_wrong_arguments_are_named(q_shape: tuple[int, ...], k_shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope(torch.zeros(q_shape), torch.zeros(k_shape), torch.tensor([0, 1]), *tables(4))
