"""Linear layers over weights as checkpoints store them, of any precision up to that of x."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """Linear layers that share their input: parts [N_i, K] of one dtype, bias [sum of N_i] or none.

    The parts may lie anywhere (views of a mapped file, say) and are never copied; they must not be moved or resized.
    Raises ValueError or TypeError for shapes and dtypes.
    """

    parts: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts is empty, expected at least one weight")
        for i, part in enumerate(self.parts):
            check_shape(f"parts[{i}]", part, (None, self.columns))
            check_dtype(f"parts[{i}]", part, self.dtype)
            check_rows(f"parts[{i}]", part)
        if self.bias is not None:
            check_shape("bias", self.bias, (self.rows,))
            check_rows("bias", self.bias)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @cached_property
    def columns(self) -> int:
        """K, the width of the input."""
        return self.parts[0].shape[-1]

    @cached_property
    def rows(self) -> int:
        """The width of the output."""
        return sum(part.shape[0] for part in self.parts)


def linear(x: torch.Tensor, weights: LinearWeights, *, backend: Backend | None = None) -> torch.Tensor:
    """x W^T + bias, W being the parts on top of each other. Sums are float32, and rounded once.

    x: [M, K], of the bias's dtype. Weights in bfloat16 are widened exactly as they are read, so float32 x gives the
    answers of a float32 model for half of its memory. Returns [M, sum of N_i] in x's dtype.
    Raises ValueError or TypeError for shapes and dtypes.
    """
    check_shape("x", x, (None, weights.columns))
    check_rows("x", x)
    if weights.bias is not None:
        check_dtype("bias", weights.bias, x.dtype)
    out = x.new_empty((x.shape[0], weights.rows))
    if backend == "triton":
        raise ValueError("backend='triton' has no linear: on GPUs torch's own, the vendor's library, computes")
    if backend is None and x.is_cuda:
        backend = "reference"
    implementation("linear", "linear", x, backend)(x, weights, out)
    return out
