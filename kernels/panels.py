"""Floating-point weight matrices in the order in which the C++ of CPUs multiplies them.

PANEL rows lie interleaved, column after column, so that one vector holds a column of several rows: products need
neither transposing nor sums across a vector, and memory is read in order, from a few places at once, as it is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import check_shape

PANEL = 16
PANEL_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class PanelMatrix:
    """W [rows, columns]. packed: [P, columns, PANEL], P = ceil(rows / PANEL), whose panels are contiguous.

    Element [p, k, i] is column k of row p * PANEL + i; of bfloat16, [p, k, 2j + h] is that of row
    p * PANEL + h * PANEL / 2 + j, so that 32 bits hold rows half a panel apart, each of which a shift or a mask widens.
    Rows that only fill the last panel are zeros. Raises ValueError or TypeError for what does not fit together.
    """

    rows: int
    packed: torch.Tensor

    def __post_init__(self) -> None:
        check_shape("packed", self.packed, (-(-self.rows // PANEL), None, PANEL))
        if self.dtype not in PANEL_DTYPES:
            raise TypeError(f"packed has dtype {self.dtype}, expected {' or '.join(map(str, PANEL_DTYPES))}")
        if self.packed.stride()[1:] != (PANEL, 1):
            raise ValueError(f"packed has strides {self.packed.stride()}, expected (*, {PANEL}, 1)")

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.packed.shape[1]


def panel_shape(shape: tuple[int, int]) -> tuple[int, int, int]:
    """Of `packed`, for W of `shape`."""
    rows, columns = shape
    return -(-rows // PANEL), columns, PANEL


def pack(matrix: torch.Tensor) -> PanelMatrix:
    """A copy of `matrix` [N, K] in panels."""
    rows, columns = matrix.shape
    packed = matrix.new_empty(panel_shape((rows, columns)))
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -rows % PANEL))
    plain = _in_plain_order(packed)
    plain.copy_(padded.view(plain.shape))
    return PanelMatrix(rows, packed)


def unpacked(matrix: PanelMatrix) -> torch.Tensor:
    """W as a plain tensor [N, K]."""
    return _in_plain_order(matrix.packed).reshape(-1, matrix.shape[1])[: matrix.rows]


def _in_plain_order(packed: torch.Tensor) -> torch.Tensor:
    """A view whose last dimension is columns and whose others are rows."""
    if packed.dtype == torch.bfloat16:
        return packed.view(*packed.shape[:2], PANEL // 2, 2).permute(0, 3, 2, 1)
    return packed.transpose(1, 2)


def sliced(matrix: PanelMatrix, rows: range, columns: range) -> PanelMatrix:
    """These rows and columns: a view where the rows are whole panels, else a copy."""
    if rows.start % PANEL or (rows.stop % PANEL and rows.stop != matrix.rows):
        return pack(unpacked(matrix)[rows.start : rows.stop, columns.start : columns.stop])
    first, last = rows.start // PANEL, -(-rows.stop // PANEL)
    return PanelMatrix(len(rows), matrix.packed[first:last, columns.start : columns.stop])
