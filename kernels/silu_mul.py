"""The gate of a SwiGLU feed-forward block (Shazeer, 2020)."""

from __future__ import annotations

import torch

from kernels.checks import check_rows, check_shape
from kernels.dispatch import Backend, implementation


def silu_mul(gate_up: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """silu(gate) * up in float32, rounded once; silu(x) = x / (1 + exp(-x)).

    gate_up: [T, 2F], the gate in the first F columns. Returns [T, F]. Raises ValueError for shapes.
    """
    check_shape("gate_up", gate_up, (None, None))
    check_rows("gate_up", gate_up)
    num_tokens, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up has {columns} columns, expected an even number")
    out = torch.empty((num_tokens, columns // 2), dtype=gate_up.dtype, device=gate_up.device)
    implementation("silu_mul", "silu_mul", gate_up, backend)(gate_up, out)
    return out
