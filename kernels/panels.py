"""Floating-point weight matrices in the order in which the C++ of CPUs multiplies them.

PANEL rows lie interleaved, column after column (of bfloat16: pair of columns after pair), so that one vector holds a
column of several rows: products need neither transposing nor sums across a vector, and memory is read in order, from a
few places at once, as it is fastest. Instructions that multiply bfloat16 take pairs as they lie; for others a shift or
a mask widens either column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import check_shape

PANEL = 16
_PAIR = 2  # columns that lie side by side in bfloat16
PANEL_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class PanelMatrix:
    """W [rows, columns], P = ceil(rows / PANEL) panels, each of them contiguous.

    packed: float32 [P, columns, PANEL], or bfloat16 [P, ceil(columns / 2), PANEL, 2] whose [p, k, i, h] is column
    2k + h of row p * PANEL + i. Rows and columns that only fill the last panel or pair are zeros.
    Raises ValueError or TypeError for what does not fit together.
    """

    rows: int
    columns: int
    packed: torch.Tensor

    def __post_init__(self) -> None:
        if self.dtype not in PANEL_DTYPES:
            raise TypeError(f"packed has dtype {self.dtype}, expected {' or '.join(map(str, PANEL_DTYPES))}")
        check_shape("packed", self.packed, panel_shape(self.shape, self.dtype))
        expected = (PANEL * _PAIR, _PAIR, 1) if self.dtype == torch.bfloat16 else (PANEL, 1)
        if self.packed.stride()[1:] != expected:
            raise ValueError(
                f"packed has strides {self.packed.stride()}, expected (*, {', '.join(map(str, expected))})"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


def panel_shape(shape: tuple[int, int], dtype: torch.dtype) -> tuple[int, ...]:
    """Of `packed`, for W of `shape` and `dtype`."""
    rows, columns = shape
    num_panels = -(-rows // PANEL)
    if dtype == torch.bfloat16:
        return num_panels, -(-columns // _PAIR), PANEL, _PAIR
    return num_panels, columns, PANEL


def pack(matrix: torch.Tensor) -> PanelMatrix:
    """A copy of `matrix` [N, K] in panels."""
    rows, columns = matrix.shape
    packed = matrix.new_empty(panel_shape((rows, columns), matrix.dtype))
    odd = columns % _PAIR if matrix.dtype == torch.bfloat16 else 0
    padded = torch.nn.functional.pad(matrix, (0, odd, 0, -rows % PANEL))
    plain = _in_plain_order(packed)
    plain.copy_(padded.view(plain.shape))
    return PanelMatrix(rows, columns, packed)


def unpacked(matrix: PanelMatrix) -> torch.Tensor:
    """W as a plain tensor [N, K]."""
    panels = _in_plain_order(matrix.packed)
    return panels.flatten(2).flatten(0, 1)[: matrix.rows, : matrix.columns]


def _in_plain_order(packed: torch.Tensor) -> torch.Tensor:
    """A view [panel, row, column], or [panel, row, pair, column]."""
    return packed.transpose(1, 2)


def sliced(matrix: PanelMatrix, rows: range, columns: range) -> PanelMatrix:
    """These rows and columns: a view where they are whole panels and pairs, else a copy."""
    unit = _PAIR if matrix.dtype == torch.bfloat16 else 1
    if not (_is_whole(rows, PANEL, matrix.rows) and _is_whole(columns, unit, matrix.columns)):
        return pack(unpacked(matrix)[rows.start : rows.stop, columns.start : columns.stop])
    packed = matrix.packed[_units(rows, PANEL), _units(columns, unit)]
    return PanelMatrix(len(rows), len(columns), packed)


def _is_whole(run: range, unit: int, count: int) -> bool:
    """Whether a part of `count` things begins and ends between units."""
    return run.start % unit == 0 and (run.stop % unit == 0 or run.stop == count)


def _units(run: range, unit: int) -> slice:
    return slice(run.start // unit, -(-run.stop // unit))
