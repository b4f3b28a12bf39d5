from __future__ import annotations

import pytest
import torch

from kernels.linear import LinearWeights, linear, prefers_panels
from kernels.panels import PANEL, PanelMatrix, pack, panel_shape, sliced, unpacked
from tests.kernels.backends import every_backend, every_cpu, using
from tests.kernels.test_linear import BFLOAT16, FLOAT32, assert_product, make_weights, make_x

every_dtype = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])


@every_dtype
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("columns", [1, 3, 64])
def test_packing_loses_nothing(dtype: torch.dtype, rows: int, columns: int) -> None:
    matrix = torch.randn(rows + 1, columns + 2).to(dtype)[1:, 1:-1]
    packed = pack(matrix)
    assert packed.shape == (rows, columns)
    assert packed.packed.shape == panel_shape((rows, columns), dtype)
    assert torch.equal(unpacked(packed), matrix)


@every_dtype
def test_the_order_is_the_one_that_is_documented(dtype: torch.dtype) -> None:
    matrix = torch.arange(20 * 3).view(20, 3).to(dtype)
    packed = pack(matrix).packed
    for row in range(20):
        stored = packed[row // PANEL, :, row % PANEL].flatten()
        assert torch.equal(stored[:3], matrix[row])
        assert (stored[3:] == 0).all()  # the column that fills a pair
    assert (packed[1, :, 4:] == 0).all()  # rows that do not exist


@every_dtype
@pytest.mark.parametrize(
    ("rows", "columns", "is_view"),
    [
        (range(16, 48), range(63), True),
        (range(32), range(8, 24), True),
        (range(16, 50), range(4, 63), True),
        (range(8, 24), range(63), False),
        (range(16, 40), range(63), False),
        (range(32), range(1, 63), None),
        (range(32), range(8, 23), None),
    ],
)
def test_a_slice_is_that_part(dtype: torch.dtype, rows: range, columns: range, is_view: bool | None) -> None:
    """None: where no pair of columns is cut."""
    matrix = torch.randn(50, 63).to(dtype)
    whole = pack(matrix)
    part = sliced(whole, rows, columns)
    assert torch.equal(unpacked(part), matrix[rows.start : rows.stop, columns.start : columns.stop])
    shares = part.packed.untyped_storage().data_ptr() == whole.packed.untyped_storage().data_ptr()
    assert shares == (dtype == FLOAT32 if is_view is None else is_view)


@every_backend
@every_dtype
@pytest.mark.parametrize("x_dtype", [FLOAT32, BFLOAT16])
def test_products_over_panels(implementation: str, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    plain = make_weights((50, 7, 33), 100, dtype, bias=x_dtype)
    panels = LinearWeights(tuple(map(pack, plain.tensors)), plain.bias)
    x = make_x(9, 100, x_dtype)
    with using(implementation) as backend:
        out = linear(x, panels, backend=backend)
        assert_product(out, x, plain)
        if backend == "cpu":
            assert torch.equal(out, linear(x, plain, backend=backend))


@every_cpu
@every_dtype
@pytest.mark.parametrize("x_dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 61])
@pytest.mark.parametrize("columns", [range(20, 82), range(20, 81), range(21, 81)])
def test_columns_of_wider_panels(
    implementation: str, dtype: torch.dtype, x_dtype: torch.dtype, rows: int, columns: range
) -> None:
    """One rank's part of a matrix that is summed over the ranks; what is around it is never read into a sum."""
    matrix = torch.full((70, 90), torch.nan, dtype=dtype)
    matrix[:, columns.start : columns.stop] = torch.randn(70, len(columns)).to(dtype)
    part = sliced(pack(matrix), range(70), columns)
    x = make_x(rows, len(columns), x_dtype)
    with using(implementation) as backend:
        plain = LinearWeights((matrix[:, columns.start : columns.stop],))
        assert_product(linear(x, LinearWeights((part,)), backend=backend), x, plain)


def test_who_prefers_panels() -> None:
    cpu = torch.device("cpu")
    assert prefers_panels(cpu, FLOAT32)
    assert prefers_panels(cpu, BFLOAT16)
    assert not prefers_panels(cpu, torch.float64)
    assert not prefers_panels(torch.device("cuda"), FLOAT32)


def test_what_does_not_fit_together_is_named() -> None:
    with pytest.raises(ValueError, match=r"packed has shape \(2, 5, 16\), expected \(3, 5, 16\)"):
        PanelMatrix(33, 5, torch.zeros(2, 5, PANEL))
    with pytest.raises(ValueError, match=r"packed has shape \(1, 5, 16, 2\), expected \(1, 6, 16, 2\)"):
        PanelMatrix(16, 11, torch.zeros(1, 5, PANEL, 2).bfloat16())
    with pytest.raises(TypeError, match=r"packed has dtype torch.float16, expected torch.float32 or torch.bfloat16"):
        PanelMatrix(16, 5, torch.zeros(1, 5, PANEL).half())
    with pytest.raises(ValueError, match=r"packed has strides \(80, 1, 5\), expected \(\*, 16, 1\)"):
        PanelMatrix(16, 5, torch.zeros(1, PANEL, 5).transpose(1, 2))
    matrix = torch.zeros(4, 8)
    with pytest.raises(TypeError, match=r"parts\[1\] is panels torch.float32, expected plain torch.float32"):
        LinearWeights((matrix, pack(matrix)))
    with pytest.raises(TypeError, match="have no plain tensors"):
        _ = LinearWeights((pack(matrix),)).tensors
