"""CPU implementations for kernels/sampling.py: sampling.h; `sample`'s single steps are the references."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from kernels.cpu.library import Draw, PreparedCall, dtype_code, library
from kernels.reference import sampling as reference
from kernels.sampling import Draws, Sample

filter_logits = reference.filter_logits
draw = reference.draw


def prepared_greedy(logits: torch.Tensor) -> Callable[[], list[int]]:
    """What it returns gives B token ids."""
    token_ids = (ctypes.c_int64 * logits.shape[0])()
    arguments = (*_rows_of(logits), None, None, ctypes.addressof(token_ids), torch.get_num_threads())
    call = PreparedCall(library().sample, arguments, owners=(logits,))

    def compute() -> list[int]:
        call()
        return list(token_ids)

    return compute


def prepared_sample(logits: torch.Tensor) -> Sample:
    """What it returns gives B token ids."""
    draws, token_ids = (Draw * logits.shape[0])(), (ctypes.c_int64 * logits.shape[0])()
    scratch = torch.empty(logits.shape, dtype=torch.int64)  # of which few pages are touched
    outputs = (scratch.data_ptr(), ctypes.addressof(token_ids), torch.get_num_threads())
    call = PreparedCall(library().sample, (*_rows_of(logits), draws, *outputs), owners=(logits, scratch))

    def compute(how: Draws) -> list[int]:
        gaps = [math.log(p) if p > 0.0 else -math.inf for p in how.min_p]
        for row, parameters in enumerate(zip(*how._replace(min_p=gaps), strict=True)):
            draws[row] = Draw(*parameters)
        call()
        return list(token_ids)

    return compute


def _rows_of(logits: torch.Tensor) -> tuple[int, ...]:
    """The arguments that say where rows of logits lie."""
    return dtype_code(logits), logits.data_ptr(), logits.stride(0), *logits.shape
