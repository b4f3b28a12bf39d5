"""CPU implementation of kernels/linear.py: linear.h."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from kernels.cpu.library import MAX_DEPTH, Weights, dtype_code, library, weights_of
from kernels.dispatch import CPU_DTYPES
from kernels.linear import LinearWeights
from kernels.reference import linear as reference

_WEIGHT_DTYPES = (*CPU_DTYPES, torch.int8, torch.uint8)

_described: WeakKeyDictionary[LinearWeights, Weights] = WeakKeyDictionary()


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
    """`weights` as ops.h has them. Made once for each object: it would take longer than a small product."""
    found = _described.get(weights)
    if found is None:
        found = _described[weights] = weights_of(weights.parts)
    return found


def runs_in_cpp(weights: LinearWeights) -> bool:
    """The others go to torch."""
    return weights.dtype in _WEIGHT_DTYPES and 0 < weights.columns <= MAX_DEPTH
