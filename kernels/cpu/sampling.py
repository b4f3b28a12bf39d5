"""CPU implementations for kernels/sampling.py: sampling.h; `sample`'s single steps are the references."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch

from kernels.cpu.library import Draw, PreparedCall, dtype_code, library
from kernels.reference import sampling as reference

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


def sample(
    logits: torch.Tensor,
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    uniforms: Sequence[float],
    out: torch.Tensor,
) -> None:
    """Fills out int64 [B]."""
    gaps = [math.log(p) if p > 0.0 else -math.inf for p in min_p]
    draws = (Draw * len(gaps))(*map(Draw, temperature, top_k, top_p, gaps, uniforms))
    scratch = torch.empty(logits.shape, dtype=torch.int64)  # of which few pages are touched
    library().sample(*_rows_of(logits), draws, scratch.data_ptr(), out.data_ptr(), torch.get_num_threads())


def _rows_of(logits: torch.Tensor) -> tuple[int, ...]:
    """The arguments that say where rows of logits lie."""
    return dtype_code(logits), logits.data_ptr(), logits.stride(0), *logits.shape
