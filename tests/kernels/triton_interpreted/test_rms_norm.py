from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.rms_norm import fused_add_rms_norm, rms_norm
from tests.kernels.cases import Array, assert_close, float64
from tests.kernels.triton_interpreted.precisions import DTYPES

cases = given(
    rows=st.integers(0, 5),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([128, 576, 600, 4096])),
    padding=st.sampled_from([0, 3]),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=st.integers(0, 2**16),
)


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Array:
    wide = float64(x)
    result: Array = wide / np.sqrt((wide**2).mean(1, keepdims=True) + eps) * float64(weight)
    return result


@cases
def test_rms_norm(
    rows: int, columns: int, padding: int, dtype: torch.dtype, size: float, eps: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = (torch.randn(rows, columns + padding) * size).to(dtype)[:, :columns], torch.randn(columns).to(dtype)
    assert_close(rms_norm(x, weight, eps, backend="triton"), normalised(x, weight, eps))


@cases
def test_with_the_residual_added(
    rows: int, columns: int, padding: int, dtype: torch.dtype, size: float, eps: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = (torch.randn(rows, columns + padding) * size).to(dtype)[:, :columns], torch.randn(columns).to(dtype)
    residual = torch.randn(rows, columns + 2 * padding).to(dtype)[:, :columns]
    total = (x.double() + residual.double()).to(dtype)
    normed, new_residual = fused_add_rms_norm(x, residual, weight, eps, backend="triton")
    assert torch.equal(new_residual, total)
    assert_close(normed, normalised(total, weight, eps))
