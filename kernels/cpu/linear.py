"""CPU implementation of kernels/linear.py: linear.h."""

from __future__ import annotations

import sys
from weakref import WeakKeyDictionary

import torch

from kernels.cpu.library import MAX_DEPTH, Weights, dtype_code, library, weights_of
from kernels.dispatch import CPU_DTYPES
from kernels.linear import LinearWeights
from kernels.reference import linear as reference

# Up to here reading the weights costs more than any arithmetic, also without the matrix units that torch would use.
_MEMORY_BOUND_ROWS = 8

_WEIGHT_DTYPES = (*CPU_DTYPES, torch.int8, torch.uint8)

_described: WeakKeyDictionary[LinearWeights, Weights] = WeakKeyDictionary()


def linear(x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
    """Fills out [M, N]."""
    if not 0 < x.shape[0] <= max_rows_in_cpp(weights, x.dtype):
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


def max_rows_in_cpp(weights: LinearWeights, x_dtype: torch.dtype) -> int:
    """Batches of more rows go to torch; 0: all do."""
    if weights.dtype not in _WEIGHT_DTYPES or not 0 < weights.columns <= MAX_DEPTH:
        return 0
    both_bfloat16 = x_dtype == weights.dtype == torch.bfloat16
    return _MEMORY_BOUND_ROWS if both_bfloat16 and _torch_has_better_units() else sys.maxsize


def _torch_has_better_units() -> bool:
    """Whether the processor multiplies bfloat16 in a way (AVX512-BF16) that torch makes use of and our C++ does not."""
    return torch.cpu._is_avx512_bf16_supported() and library().isa != "amx"
