"""CPU implementation of kernels/rope.py: rowwise.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import OK, dtype_code, heads_of, library


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] in place. Raises IndexError for a position outside the tables."""
    positions = positions.contiguous()
    bad = library().rope(
        dtype_code(q),
        heads_of(q),
        heads_of(k),
        cos.shape[1],
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[0],
        torch.get_num_threads(),
    )
    if bad != OK:
        raise IndexError(f"position {int(positions[bad])} of token {bad} is outside 0 .. {cos.shape[0] - 1}")
