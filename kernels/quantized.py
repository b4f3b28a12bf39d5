"""Weight matrices of small integers: what they mean, the order in which they lie in memory, and how floats become them.

    W[n, k] = row_scales[n] * (scales[n, k // group] * q[n, k] + offsets[n, k // group])

Rows lie in panels of PANEL, columns in steps of STEP, so that one vector holds a few columns of many rows: products
need neither transposing nor sums across a vector. Rows and columns that only fill the last panel or step are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.checks import check_dtype, check_shape
from kernels.panels import PANEL

STEP = 8  # columns of one piece of memory
GROUPS = (32, 64, 128)  # columns that share a scale
MIDDLE = 8  # what a 4-bit q stands for when there are no offsets: q - 8


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """W [rows, columns] in 8 or 4 bits. Shapes, with P = ceil(rows / PANEL), S = ceil(columns / STEP), G groups:

    packed: int8 [P, S, 2, PANEL, 4] holds column 8s + 4j + i of a row at [s, j, row, i]; or
        uint8 [P, S, PANEL, 4], where [s, row, i] holds column 8s + i in its lower half, column 8s + 4 + i in its upper.
    row_scales: float32 [P * PANEL].
    scales: float16 [P, G, PANEL], or none: 1. 4-bit matrices have them.
    offsets: float16 or float32 [P, G, PANEL], or none: 0 in 8 bits, -8 times the scale in 4.
    Raises ValueError or TypeError for what does not fit together.
    """

    rows: int
    columns: int
    packed: torch.Tensor
    row_scales: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_panels, num_steps = -(-self.rows // PANEL), -(-self.columns // STEP)
        if self.packed.dtype == torch.int8:
            check_shape("packed", self.packed, (num_panels, num_steps, 2, PANEL, 4))
        else:
            check_dtype("packed", self.packed, torch.uint8)
            check_shape("packed", self.packed, (num_panels, num_steps, PANEL, 4))
            if self.scales is None:
                raise ValueError("scales is None, expected a tensor for weights of 4 bits")
        check_shape("row_scales", self.row_scales, (num_panels * PANEL,))
        check_dtype("row_scales", self.row_scales, torch.float32)
        if self.scales is not None:
            check_shape("scales", self.scales, (num_panels, self._num_groups, PANEL))
            check_dtype("scales", self.scales, torch.float16)
        if self.offsets is not None:
            if self.scales is None or self.offsets.dtype not in (torch.float16, torch.float32):
                raise TypeError("offsets: expected float16 or float32, and scales beside them")
            check_shape("offsets", self.offsets, tuple(self.scales.shape))
        for tensor in (self.packed, self.row_scales, self.scales, self.offsets):
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError("packed, row_scales, scales and offsets must be contiguous")

    @property
    def bits(self) -> int:
        return 8 if self.packed.dtype == torch.int8 else 4

    @cached_property
    def group(self) -> int | None:
        """Columns that share a scale; None: all."""
        return None if self.scales is None else group_of(self.columns, self.scales.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def format(self) -> tuple[object, ...]:
        """What matrices that are multiplied in one call have in common."""
        return self.bits, self.group, None if self.offsets is None else self.offsets.dtype

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, self.row_scales, self.scales, self.offsets) if t is not None)

    @property
    def _num_groups(self) -> int | None:
        """Any number that some group size makes."""
        found = None if self.scales is None else self.scales.shape[1]
        if found is not None and group_of(self.columns, found) is None:
            raise ValueError(f"scales has {found} groups for {self.columns} columns: expected groups of {GROUPS}")
        return found


def group_of(columns: int, num_groups: int) -> int | None:
    """The group size that makes `num_groups` of `columns`, the smallest if several do; None: there is none."""
    return next((group for group in GROUPS if -(-columns // group) == num_groups), None)


def pack(
    levels: torch.Tensor,
    *,
    bits: int,
    row_scales: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """From plain order. levels: integer [N, K], signed of 8 bits or 0 .. 15; row_scales [N], or 1;
    scales and offsets [N, ceil(K / group)].
    """
    rows, columns = levels.shape
    num_panels, num_steps = -(-rows // PANEL), -(-columns // STEP)
    padded = levels.new_zeros((num_panels * PANEL, num_steps * STEP))
    padded[:rows, :columns] = levels
    steps = padded.view(num_panels, PANEL, num_steps, STEP)
    if bits == 8:
        packed = steps.to(torch.int8).view(num_panels, PANEL, num_steps, 2, 4).permute(0, 2, 3, 1, 4)
    else:
        nibbles = steps.to(torch.uint8).transpose(1, 2)
        packed = nibbles[..., :4] | nibbles[..., 4:] << 4
    if row_scales is None:
        row_scales = torch.ones(rows, device=levels.device)
    return QuantizedMatrix(
        rows,
        columns,
        packed.contiguous(),
        torch.nn.functional.pad(row_scales.float(), (0, num_panels * PANEL - rows)),
        None if scales is None else _in_panels(scales.half()),
        None if offsets is None else _in_panels(offsets),
    )


def levels_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """q, int16 [N, K]."""
    num_panels, num_steps = matrix.packed.shape[:2]
    if matrix.bits == 8:
        steps = matrix.packed.permute(0, 3, 1, 2, 4)
    else:
        steps = torch.cat((matrix.packed & 15, matrix.packed >> 4), dim=-1).transpose(1, 2)
    plain = steps.reshape(num_panels * PANEL, num_steps * STEP)
    return plain[: matrix.rows, : matrix.columns].to(torch.int16)


def dequantized(matrix: QuantizedMatrix) -> torch.Tensor:
    """W, float32 [N, K]."""
    values = levels_of(matrix).float()
    if matrix.scales is not None and matrix.group is not None:
        scales = _of_columns(matrix, matrix.scales, matrix.group)
        if matrix.offsets is not None:
            values = values * scales + _of_columns(matrix, matrix.offsets, matrix.group)
        else:
            values = (values - MIDDLE if matrix.bits == 4 else values) * scales
    return values * matrix.row_scales[: matrix.rows, None]


def sliced(matrix: QuantizedMatrix, rows: range, columns: range) -> QuantizedMatrix:
    """These rows and columns: views where they are whole panels of whole rows, else a copy.

    Raises ValueError when `columns` do not begin and end between groups (without groups: between steps).
    """
    unit = matrix.group or STEP
    if columns.start % unit or (columns.stop % unit and columns.stop != matrix.columns):
        raise ValueError(f"columns {columns.start} to {columns.stop} cut a group of {unit}")
    if rows.start % PANEL or (rows.stop % PANEL and rows.stop != matrix.rows):
        matrix, rows = _repacked(matrix, rows), range(len(rows))
    first, last = rows.start // PANEL, -(-rows.stop // PANEL)
    steps = slice(columns.start // STEP, -(-columns.stop // STEP))
    groups = slice(columns.start // unit, -(-columns.stop // unit))
    return QuantizedMatrix(
        len(rows),
        len(columns),
        matrix.packed[first:last, steps].contiguous(),
        matrix.row_scales[first * PANEL : last * PANEL],
        None if matrix.scales is None else matrix.scales[first:last, groups].contiguous(),
        None if matrix.offsets is None else matrix.offsets[first:last, groups].contiguous(),
    )


def _repacked(matrix: QuantizedMatrix, rows: range) -> QuantizedMatrix:
    """These rows alone, in panels of their own."""
    scales, offsets = (
        None if t is None else _of_rows(t)[rows.start : rows.stop] for t in (matrix.scales, matrix.offsets)
    )
    return pack(
        levels_of(matrix)[rows.start : rows.stop],
        bits=matrix.bits,
        row_scales=matrix.row_scales[rows.start : rows.stop],
        scales=scales,
        offsets=offsets,
    )


def _of_rows(values: torch.Tensor) -> torch.Tensor:
    """[P, G, PANEL] -> [P * PANEL, G]."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def _in_panels(values: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [P, G, PANEL], zeros in the rows added."""
    rows, groups = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()


def _of_columns(matrix: QuantizedMatrix, values: torch.Tensor, group: int) -> torch.Tensor:
    """[P, G, PANEL] -> float32 [N, K], the value of each column's group."""
    of_rows = _of_rows(values.float())[: matrix.rows]
    return of_rows.repeat_interleave(group, dim=1)[:, : matrix.columns]
