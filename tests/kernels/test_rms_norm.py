from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rms_norm import fused_add_rms_norm, rms_norm
from tests.kernels.backends import every_backend, using
from tests.kernels.cases import Array, assert_close, float64

EPS = 1e-5
inputs = given(
    rows=st.integers(0, 40),
    columns=st.sampled_from([1, 5, 64, 72, 576]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)


def oracle(x: Array, weight: Array) -> Array:
    result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
    return result


@every_backend
@inputs
@settings(max_examples=40, deadline=None)
def test_rms_norm(implementation: str, rows: int, columns: int, dtype: torch.dtype, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns + 3, generator=generator) * size).to(dtype)[:, :columns]
    weight = torch.randn(columns, generator=generator).to(dtype)
    with using(implementation) as backend:
        assert_close(rms_norm(x, weight, EPS, backend=backend), oracle(float64(x), float64(weight)))


@every_backend
@inputs
@settings(max_examples=40, deadline=None)
def test_fused_add(implementation: str, rows: int, columns: int, dtype: torch.dtype, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns + 3, generator=generator) * size).to(dtype)[:, :columns]
    residual = torch.randn(rows, columns, generator=generator).to(dtype)
    weight = torch.randn(columns, generator=generator).to(dtype)
    expected_sum = (x.double() + residual.double()).to(dtype)
    with using(implementation) as backend:
        normed, total = fused_add_rms_norm(x, residual, weight, EPS, backend=backend)
    assert torch.equal(total, expected_sum)
    assert_close(normed, oracle(float64(expected_sum), float64(weight)))


@every_backend
def test_inputs_are_left_alone(implementation: str) -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    before = x.clone(), residual.clone(), weight.clone()
    with using(implementation) as backend:
        fused_add_rms_norm(x, residual, weight, EPS, backend=backend)
    assert all(map(torch.equal, (x, residual, weight), before))


@every_backend
def test_many_rows_on_several_threads(implementation: str) -> None:
    torch.set_num_threads(3)
    x, weight = torch.randn(400, 576), torch.randn(576)
    with using(implementation) as backend:
        assert_close(rms_norm(x, weight, EPS, backend=backend), oracle(float64(x), float64(weight)))


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\), expected \(8\)"):
        rms_norm(x, torch.zeros(7), EPS)
    with pytest.raises(TypeError, match=r"weight has dtype torch.bfloat16, expected torch.float32"):
        rms_norm(x, torch.zeros(8).bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"residual has shape \(2, 8\), expected \(3, 8\)"):
        fused_add_rms_norm(x, torch.zeros(2, 8), torch.zeros(8), EPS)
