from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.silu_mul import silu_mul
from tests.kernels.cases import assert_close, float64
from tests.kernels.triton_interpreted.precisions import DTYPES


@given(
    rows=st.integers(0, 4),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([1024, 1100, 2049])),
    padding=st.sampled_from([0, 5]),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.01, 1.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_formula(rows: int, columns: int, padding: int, dtype: torch.dtype, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * columns + padding) * size).to(dtype)[:, : 2 * columns]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    assert_close(silu_mul(gate_up, backend="triton"), gate / (1 + np.exp(-gate)) * up)
