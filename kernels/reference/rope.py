"""Reference of kernels/rope.py."""

from __future__ import annotations

import torch

from kernels.reference.precision import widened


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] in place. Raises IndexError for a position outside the tables."""
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        raise IndexError(f"positions {int(positions.min())} .. {int(positions.max())} leave 0 .. {cos.shape[0] - 1}")
    token_cos, token_sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for tensor in (q, k):
        turning = tensor[..., : 2 * cos.shape[1]]
        first, second = widened(turning).chunk(2, dim=-1)
        rotated = torch.cat((first * token_cos - second * token_sin, second * token_cos + first * token_sin), dim=-1)
        turning.copy_(rotated)
