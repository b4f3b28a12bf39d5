"""CPU implementation of kernels/linear.py: linear.h."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from kernels.cpu.library import MAX_DEPTH, Weights, dtype_code, library, weights_of
from kernels.dispatch import CPU_DTYPES
from kernels.linear import LinearWeights, Part
from kernels.panels import PanelMatrix, pack, unpacked
from kernels.reference import linear as reference

_WEIGHT_DTYPES = (*CPU_DTYPES, torch.int8, torch.uint8)

# The builds that multiply bfloat16 by bfloat16 in units of their own, weights as checkpoints store them.
_ISAS_WITH_UNITS = ("avx512bf16", "amx")


@dataclass(frozen=True, slots=True)
class _Description:
    """Weights as ops.h has them, and the parts whose memory that points to."""

    struct: Weights
    parts: tuple[Part, ...]


_described: WeakKeyDictionary[LinearWeights, dict[bool, _Description]] = WeakKeyDictionary()


def linear(x: torch.Tensor, weights: LinearWeights, out: torch.Tensor) -> None:
    """Fills out [M, N]."""
    if x.shape[0] == 0 or not runs_in_cpp(weights):
        return reference.linear(x, weights, out)
    library().linear(
        dtype_code(x),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        weights_struct(weights, x.dtype),
        None if weights.bias is None else weights.bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def weights_struct(weights: LinearWeights, x_dtype: torch.dtype) -> Weights:
    """`weights` as ops.h has them for x of `x_dtype`, in panels unless their rows are taken as they are.

    Made once for each object: it would take longer than a small product.
    """
    as_rows = takes_rows(x_dtype, weights.dtype)
    known = _described.setdefault(weights, {})
    if as_rows not in known:
        parts = tuple(_arranged(part, as_rows) for part in weights.parts)
        known[as_rows] = _Description(weights_of(parts), parts)
    return known[as_rows].struct


def takes_rows(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Whether this processor multiplies weights in the order of checkpoints."""
    return x_dtype == weight_dtype == torch.bfloat16 and library().isa in _ISAS_WITH_UNITS


def _arranged(part: Part, as_rows: bool) -> Part:
    if isinstance(part, PanelMatrix):
        return unpacked(part) if as_rows else part
    return pack(part) if isinstance(part, torch.Tensor) and not as_rows else part


def runs_in_cpp(weights: LinearWeights) -> bool:
    """The others go to torch."""
    return weights.dtype in _WEIGHT_DTYPES and 0 < weights.columns <= MAX_DEPTH
