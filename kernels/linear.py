"""Linear layers over weights as checkpoints store them: of any precision up to that of x, or small integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation
from kernels.quantized import QuantizedMatrix


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """Linear layers that share their input: parts [N_i, K] of one dtype or format, bias [sum of N_i] or none.

    The parts may lie anywhere (views of a mapped file, say) and are never copied; they must not be moved or resized.
    Raises ValueError or TypeError for shapes, dtypes and formats.
    """

    parts: tuple[torch.Tensor | QuantizedMatrix, ...]
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts is empty, expected at least one weight")
        for i, part in enumerate(self.parts):
            if isinstance(part, torch.Tensor):
                check_shape(f"parts[{i}]", part, (None, self.columns))
                check_dtype(f"parts[{i}]", part, self.dtype)
                check_rows(f"parts[{i}]", part)
            else:
                _check_alike(f"parts[{i}]", part, self.parts[0])
        if self.bias is not None:
            check_shape("bias", self.bias, (self.rows,))
            check_rows("bias", self.bias)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the numbers in memory: int8 for 8 bits, uint8 for 4."""
        first = self.parts[0]
        return first.packed.dtype if isinstance(first, QuantizedMatrix) else first.dtype

    @cached_property
    def is_quantized(self) -> bool:
        return isinstance(self.parts[0], QuantizedMatrix)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parts of weights that are not quantised. Raises TypeError for others."""
        if any(isinstance(part, QuantizedMatrix) for part in self.parts):
            raise TypeError("quantised weights have no plain tensors")
        return tuple(part for part in self.parts if isinstance(part, torch.Tensor))

    @cached_property
    def columns(self) -> int:
        """K, the width of the input."""
        return self.parts[0].shape[-1]

    @cached_property
    def rows(self) -> int:
        """The width of the output."""
        return sum(part.shape[0] for part in self.parts)


def linear(x: torch.Tensor, weights: LinearWeights, *, backend: Backend | None = None) -> torch.Tensor:
    """x W^T + bias, W being the parts on top of each other. Sums are float32 or exact, and rounded once.

    x: [M, K], of the bias's dtype. Weights in bfloat16 are widened exactly as they are read, so float32 x gives the
    answers of a float32 model for half of its memory. With quantised weights an implementation may round x to integers,
    each group of columns by its largest value: to 16 bits in groups of up to 128, beside weights of 4 bits to 8 in
    groups of 32. Returns [M, sum of N_i] in x's dtype.
    Raises ValueError or TypeError for shapes and dtypes.
    """
    check_shape("x", x, (None, weights.columns))
    check_rows("x", x)
    if weights.bias is not None:
        check_dtype("bias", weights.bias, x.dtype)
    out = x.new_empty((x.shape[0], weights.rows))
    if backend is None and x.is_cuda and not weights.is_quantized:
        backend = "reference"  # that is torch's own: the vendor's library
    implementation("linear", "linear", x, backend)(x, weights, out)
    return out


def _check_alike(name: str, part: QuantizedMatrix, first: torch.Tensor | QuantizedMatrix) -> None:
    """Raises ValueError or TypeError unless both can be multiplied in one call."""
    if not isinstance(first, QuantizedMatrix):
        raise TypeError(f"{name} is quantised, expected {first.dtype} as parts[0]")
    if part.columns != first.columns:
        raise ValueError(f"{name} has shape {part.shape}, expected (*, {first.columns})")
    if part.format != first.format:
        raise TypeError(f"{name} has format {part.format}, expected {first.format}")
