"""Rotary position embedding (Su et al., 2021) in the rotate-half form that Llama checkpoints use."""

from __future__ import annotations

import torch

from kernels.checks import check_dtype, check_rope_tables, check_rows, check_shape
from kernels.dispatch import Backend, implementation


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates each pair (i, i + R/2) of q and k by its token's angle, IN PLACE, and returns q and k.

    q: [T, Hq, D]; k: [T, Hkv, D], D even; views of a fused projection are fine. positions: int64 [T].
    cos, sin: float32 [P, R/2] of position and pair; the last D - R dimensions of a head stay as they are. Products are
    float32 (float64 for float64 q) and rounded once.
    Raises ValueError or TypeError for shapes and dtypes, IndexError (CPU only) for a position outside 0 .. P - 1.
    """
    check_shape("q", q, (None, None, None))
    num_tokens, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"q has head dimension {head_dim}, expected an even one")
    check_shape("k", k, (num_tokens, None, head_dim))
    check_dtype("k", k, q.dtype)
    check_shape("positions", positions, (num_tokens,))
    check_dtype("positions", positions, torch.int64)
    for name, tensor in (("q", q), ("k", k)):
        check_rows(name, tensor)
    check_rope_tables(cos, sin, head_dim)
    implementation("rope", "rope", q, backend)(q, k, positions, cos, sin)
    return q, k
