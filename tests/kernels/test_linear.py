from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import linear as cpu_linear
from kernels.cpu.library import MAX_DEPTH
from kernels.linear import LinearWeights, linear
from tests.kernels.backends import every_backend, every_cpu, using
from tests.kernels.cases import TOLERANCE, Array, float64

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def make_weights(
    part_rows: tuple[int, ...], columns: int, dtype: torch.dtype = BFLOAT16, *, bias: torch.dtype | None = None
) -> LinearWeights:
    """Parts as views into something wider that holds NaN around them."""
    parts = []
    for rows in part_rows:
        around = torch.full((rows + 2, columns + 3), torch.nan, dtype=dtype)
        around[1:-1, 1:-2] = torch.randn(rows, columns).to(dtype)
        parts.append(around[1:-1, 1:-2])
    return LinearWeights(tuple(parts), None if bias is None else torch.randn(sum(part_rows)).to(bias))


def make_x(rows: int, columns: int, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    around = torch.full((rows, columns + 5), torch.nan, dtype=dtype)
    around[:, 2:-3] = torch.randn(rows, columns).to(dtype)
    return around[:, 2:-3]


def oracle(x: torch.Tensor, weights: LinearWeights) -> tuple[Array, Array]:
    """The float64 result, and the sum of its terms' sizes, which bounds what rounding may do to it."""
    matrix = np.concatenate([float64(part) for part in weights.tensors])
    bias = 0.0 if weights.bias is None else float64(weights.bias)
    return float64(x) @ matrix.T + bias, np.abs(float64(x)) @ np.abs(matrix).T + np.abs(bias)


def assert_product(actual: torch.Tensor, x: torch.Tensor, weights: LinearWeights) -> None:
    """Float32 sums err by less than 1e-6 of the terms' sizes, and rounding to the output's dtype comes on top."""
    expected, size = oracle(x, weights)
    assert actual.shape == expected.shape
    error = np.abs(float64(actual) - expected)
    rounding = 0.0 if actual.dtype == FLOAT32 else TOLERANCE[actual.dtype][0] * np.abs(expected)
    assert np.all(error <= 1e-6 * size + rounding)  # NaN is never less


@every_backend
@given(
    rows=st.integers(0, 13) | st.sampled_from([16, 33, 51, 101]),
    columns=st.sampled_from([0, 1, 5, 8, 16, 31, 32, 33, 64, 100, 576]),
    part_rows=st.lists(st.sampled_from([1, 2, 7, 8, 24, 25, 64, 100]), min_size=1, max_size=3).map(tuple),
    x_dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_equals_float64(
    implementation: str,
    rows: int,
    columns: int,
    part_rows: tuple[int, ...],
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weights = make_weights(part_rows, columns, dtype, bias=x_dtype if bias else None)
    x = make_x(rows, columns, x_dtype)
    with using(implementation) as backend:
        assert_product(linear(x, weights, backend=backend), x, weights)


@every_cpu
@pytest.mark.parametrize("columns", [1536, 1540, 5000])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_depths_of_several_blocks(implementation: str, columns: int, dtype: torch.dtype) -> None:
    weights, x = make_weights((30,), columns, dtype), make_x(60, columns)
    with using(implementation) as backend:
        assert_product(linear(x, weights, backend=backend), x, weights)


@every_cpu
@pytest.mark.parametrize("columns", [576, 1540])
@pytest.mark.parametrize(("x_dtype", "dtype"), [(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16)])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    implementation: str, columns: int, x_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    weights, x = make_weights((50, 31), columns, dtype, bias=x_dtype), make_x(120, columns, x_dtype)
    with using(implementation) as backend:
        whole = linear(x, weights, backend=backend)
        for rows in (1, 2, 3, 4, 5, 6, 8, 11, 16, 49, 51, 119):
            assert torch.equal(linear(x[:rows], weights, backend=backend), whole[:rows]), rows


@every_cpu
@pytest.mark.parametrize("rows", [1, 6, 101])
def test_nor_on_the_number_of_threads(implementation: str, rows: int) -> None:
    weights, x = make_weights((700, 333), 320), make_x(rows, 320)
    with using(implementation) as backend:
        alone = linear(x, weights, backend=backend)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x, weights, backend=backend), alone)


@every_cpu
def test_nor_on_the_other_parts(implementation: str) -> None:
    weights, x = make_weights((40, 7, 90), 192), make_x(9, 192)
    with using(implementation) as backend:
        alone = [linear(x, LinearWeights((part,)), backend=backend) for part in weights.tensors]
        assert torch.equal(linear(x, weights, backend=backend), torch.cat(alone, dim=1))


@every_cpu
def test_bfloat16_weights_are_widened_exactly(implementation: str) -> None:
    every_value = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    finite = every_value[every_value.isfinite()][:, None]
    with using(implementation) as backend:
        out = linear(torch.ones(1, 1), LinearWeights((finite,)), backend=backend)
    assert torch.equal(out[0], finite[:, 0].float())


@every_cpu
def test_infinities_and_nan_stay_in_their_row_and_column(implementation: str) -> None:
    weights, x = make_weights((20,), 40), make_x(7, 40)
    weights.tensors[0][3, 39] = torch.inf
    x[5, 0] = torch.nan
    with using(implementation) as backend:
        out = linear(x, weights, backend=backend)
    wrong = ~out.isfinite()
    assert wrong[5].all()
    assert wrong[:, 3].all()
    assert wrong.sum() == 20 + 7 - 1


@every_cpu
def test_deeper_than_the_kernel_packs(implementation: str) -> None:
    weights, x = make_weights((3,), MAX_DEPTH + 1), make_x(2, MAX_DEPTH + 1)
    with using(implementation) as backend:
        assert_product(linear(x, weights, backend=backend), x, weights)
    weights, x = make_weights((3,), MAX_DEPTH), make_x(6, MAX_DEPTH)
    with using(implementation) as backend:
        assert_product(linear(x, weights, backend=backend), x, weights)


@every_cpu
def test_float16_weights_go_to_the_reference(implementation: str) -> None:
    weights, x = make_weights((9,), 33, torch.float16), make_x(2, 33)
    with using(implementation) as backend:
        assert_product(linear(x, weights, backend=backend), x, weights)


def test_what_is_cached_of_weights_ends_with_them() -> None:
    weights = make_weights((9,), 33)
    linear(make_x(2, 33), weights, backend="cpu")
    before = len(cpu_linear._described)
    del weights
    assert len(cpu_linear._described) == before - 1


def test_wrong_arguments_are_named() -> None:
    weights = make_weights((4, 5), 8, bias=FLOAT32)
    with pytest.raises(ValueError, match="parts is empty"):
        LinearWeights(())
    with pytest.raises(ValueError, match=r"parts\[1\] has shape \(5, 7\), expected \(\*, 8\)"):
        LinearWeights((weights.tensors[0], torch.zeros(5, 7, dtype=BFLOAT16)))
    with pytest.raises(TypeError, match=r"parts\[1\] is plain torch.float32, expected plain torch.bfloat16"):
        LinearWeights((weights.tensors[0], torch.zeros(5, 8)))
    with pytest.raises(ValueError, match="stride 5 in its last dimension"):
        LinearWeights((torch.zeros(8, 5).T,))
    with pytest.raises(ValueError, match=r"bias has shape \(8,\), expected \(9\)"):
        LinearWeights(weights.tensors, torch.zeros(8))
    with pytest.raises(ValueError, match=r"x has shape \(2, 7\), expected \(\*, 8\)"):
        linear(torch.zeros(2, 7), weights)
    with pytest.raises(TypeError, match=r"bias has dtype torch.float32, expected torch.bfloat16"):
        linear(torch.zeros(2, 8, dtype=BFLOAT16), weights)
    with pytest.raises(TypeError, match=r"weights are torch.bfloat16: .* quantised weights only"):
        linear(torch.zeros(2, 8), weights, backend="triton")
