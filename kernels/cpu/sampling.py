"""CPU implementations for kernels/sampling.py: sampling.h; `sample`'s single steps are the references."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels.cpu.library import Draw, library
from kernels.reference import sampling as reference

filter_logits = reference.filter_logits
draw = reference.draw


def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out int64 [B]."""
    library().sample(
        logits.data_ptr(), logits.stride(0), *logits.shape, None, None, out.data_ptr(), torch.get_num_threads()
    )


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
    library().sample(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        draws,
        scratch.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
