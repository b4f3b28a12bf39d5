"""Linear layers over weights of any precision up to that of x, or of small integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, default_backend, implementation
from kernels.panels import PanelMatrix
from kernels.quantized import QuantizedMatrix

Part = torch.Tensor | PanelMatrix | QuantizedMatrix


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """Linear layers that share their input: parts [N_i, K] of one kind, bias [sum of N_i] or none.

    A part is a tensor as checkpoints store it, or what an implementation multiplies without copying it first: panels
    (see `prefers_panels`), or integers. Parts may lie anywhere (views of a mapped file, say) and must not change.
    Raises ValueError or TypeError for shapes, dtypes and formats.
    """

    parts: tuple[Part, ...]
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts is empty, expected at least one weight")
        for i, part in enumerate(self.parts):
            if isinstance(part, torch.Tensor):
                check_shape(f"parts[{i}]", part, (None, None))
                check_rows(f"parts[{i}]", part)
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
        """The parts of weights as checkpoints store them. Raises TypeError for others."""
        if not all(isinstance(part, torch.Tensor) for part in self.parts):
            raise TypeError("weights in panels, or quantised, have no plain tensors")
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
    answers of a float32 model for half of its memory. With quantised weights an implementation may round x to integers
    of 8 bits, each group of 32 columns by its largest value. Returns [M, sum of N_i] in x's dtype.
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


def prefers_panels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether x of `dtype` on `device` is multiplied by weights in panels; others are then copied when first used."""
    return default_backend(device.type, dtype) == "cpu"


def kind_of(part: Part) -> tuple[object, ...]:
    """What parts that are multiplied in one call have in common, beside their columns."""
    if isinstance(part, QuantizedMatrix):
        return "quantised", *part.format
    return "panels" if isinstance(part, PanelMatrix) else "plain", part.dtype


def _check_alike(name: str, part: Part, first: Part) -> None:
    """Raises ValueError or TypeError unless both can be multiplied in one call."""
    if part.shape[-1] != first.shape[-1]:
        raise ValueError(f"{name} has shape {tuple(part.shape)}, expected (*, {first.shape[-1]})")
    if kind_of(part) != kind_of(first):
        raise TypeError(f"{name} is {_told(part)}, expected {_told(first)} as parts[0]")


def _told(part: Part) -> str:
    return " ".join(map(str, kind_of(part)))
