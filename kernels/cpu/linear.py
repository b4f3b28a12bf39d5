"""CPU implementation of kernels/linear.py: linear.h."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from kernels.cpu.library import MAX_DEPTH, ArrangedPart, Weights, dtype_code, library, weights_of
from kernels.dispatch import CPU_DTYPES
from kernels.linear import LinearWeights, Part
from kernels.panels import pack
from kernels.reference import linear as reference

_WEIGHT_DTYPES = (*CPU_DTYPES, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class _Description:
    """Weights as ops.h has them, and the parts whose memory that points to."""

    struct: Weights
    parts: tuple[ArrangedPart, ...]


_described: WeakKeyDictionary[LinearWeights, _Description] = WeakKeyDictionary()


def linear(x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
    """Fills out [M, N]."""
    if x.shape[0] == 0 or not runs_in_cpp(weights):
        return reference.linear(x, weights, out)
    library().linear(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        weights_struct(weights),
        None if weights.bias is None else weights.bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def weights_struct(weights: LinearWeights) -> Weights:
    """`weights` as ops.h has them: in panels, or integers.

    Made once for each object: it would take longer than a small product.
    """
    if weights not in _described:
        parts = tuple(map(_arranged, weights.parts))
        _described[weights] = _Description(weights_of(parts), parts)
    return _described[weights].struct


def _arranged(part: Part) -> ArrangedPart:
    return pack(part) if isinstance(part, torch.Tensor) else part


def runs_in_cpp(weights: LinearWeights) -> bool:
    """The others go to torch."""
    return weights.dtype in _WEIGHT_DTYPES and 0 < weights.columns <= MAX_DEPTH
