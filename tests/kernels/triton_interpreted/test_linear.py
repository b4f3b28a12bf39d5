from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.linear import LinearWeights, linear
from tests.kernels.cases import Array, assert_close, float64
from tests.kernels.quantized_cases import FORMATS, Format, make_matrix
from tests.kernels.triton_interpreted.precisions import DTYPES


def random_case(rows: int, depth: int, dtype: torch.dtype, *, padding: int = 0) -> torch.Tensor:
    return torch.randn(rows, depth + padding).to(dtype)[:, :depth]


def check(x: torch.Tensor, weights: LinearWeights, values: Array) -> None:
    """Errors are those of float32 sums and of one rounding."""
    out = linear(x, weights, backend="triton")
    expected = float64(x) @ values.T
    if weights.bias is not None:
        expected += float64(weights.bias)
    sums = (abs(float64(x)) @ abs(values).T).max(initial=0.0)
    assert_close(out, expected, extra=1e-6 * sums)


@pytest.mark.parametrize("of", FORMATS, ids=str)
def test_every_format(of: Format) -> None:
    torch.manual_seed(1)
    matrix, values = make_matrix(40, 264, of)
    check(random_case(3, 264, torch.bfloat16, padding=5), LinearWeights((matrix,)), values)


@given(
    of=st.sampled_from(FORMATS),
    rows=st.sampled_from([0, 1, 2, 15, 16, 17, 33, 70]),
    columns=st.integers(1, 100),
    depth=st.integers(1, 400),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    padding=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**16),
)
@example(of=FORMATS[4], rows=70, columns=65, depth=4096, dtype=torch.float16, biased=True, padding=3, seed=0)
def test_equals_the_product_with_the_values(
    of: Format, rows: int, columns: int, depth: int, dtype: torch.dtype, biased: bool, padding: int, seed: int
) -> None:
    torch.manual_seed(seed)
    matrix, values = make_matrix(columns, depth, of)
    bias = torch.randn(columns).to(dtype) if biased else None
    check(random_case(rows, depth, dtype, padding=padding), LinearWeights((matrix,), bias), values)


def test_parts_lie_side_by_side_in_the_output() -> None:
    torch.manual_seed(2)
    first, first_values = make_matrix(20, 72, FORMATS[0])
    second, second_values = make_matrix(33, 72, FORMATS[0])
    weights = LinearWeights((first, second), torch.randn(53))
    check(
        random_case(5, 72, torch.float32),
        weights,
        torch.cat((torch.from_numpy(first_values), torch.from_numpy(second_values))).numpy(),
    )
