from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cases import Array, assert_close, float64
from tests.kernels.test_gates import Gate, every_gate
from tests.kernels.triton_interpreted.precisions import DTYPES


@every_gate
@given(
    rows=st.integers(0, 4),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([1024, 1100, 2049])),
    padding=st.sampled_from([0, 5]),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.01, 1.0, 20.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_formula(
    op: Gate,
    formula: Callable[[Array], Array],
    rows: int,
    columns: int,
    padding: int,
    dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * columns + padding) * size).to(dtype)[:, : 2 * columns]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    assert_close(op(gate_up, backend="triton"), formula(gate) * up)
