from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gates import gelu_mul, silu_mul
from tests.kernels.backends import every_backend, using
from tests.kernels.cases import Array, assert_close, float64

Gate = Callable[..., torch.Tensor]


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def gelu(x: Array) -> Array:
    twice: Array = np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)
    result: Array = x / (1 + np.exp(np.minimum(-twice, 700.0)))
    return result


every_gate = pytest.mark.parametrize(("op", "formula"), [(silu_mul, silu), (gelu_mul, gelu)], ids=["silu", "gelu"])


def test_the_formula_is_torchs_tanh_approximation() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    np.testing.assert_allclose(gelu(float64(x)), float64(F.gelu(x, approximate="tanh")), rtol=1e-9, atol=1e-12)


@every_gate
@every_backend
@given(
    rows=st.integers(0, 40),
    columns=st.sampled_from([1, 5, 64, 72, 1536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([0.01, 1.0, 20.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_equals_the_formula(
    implementation: str,
    op: Gate,
    formula: Callable[[Array], Array],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    size: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * columns + 3, generator=generator) * size).to(dtype)[:, : 2 * columns]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    with using(implementation) as backend:
        assert_close(op(gate_up, backend=backend), formula(gate) * up)


@every_gate
@every_backend
def test_extreme_gates(implementation: str, op: Gate, formula: Callable[[Array], Array]) -> None:
    gate = torch.tensor([-torch.inf, -1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30])
    gate_up = torch.cat((gate, torch.ones(8)))[None]
    with using(implementation) as backend:
        out = op(gate_up, backend=backend)[0]
    assert out[:4].nan_to_num(0.0).abs().max() < 1e-30  # at -inf both are 0, but -inf / inf has no value
    assert out[4:].tolist() == [0.0, 88.0, 200.0, pytest.approx(1e30)]


@every_gate
def test_an_odd_number_of_columns_is_refused(op: Gate, formula: Callable[[Array], Array]) -> None:
    with pytest.raises(ValueError, match="gate_up has 7 columns, expected an even number"):
        op(torch.zeros(2, 7))
