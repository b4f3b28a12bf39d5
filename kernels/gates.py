"""The gates of feed-forward blocks: SwiGLU and GeGLU (Shazeer, 2020), the latter with Gemma's approximation of GELU."""

from __future__ import annotations

import torch

from kernels.checks import check_rows, check_shape
from kernels.dispatch import Backend, implementation


def silu_mul(gate_up: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """silu(gate) * up in float32, rounded once; silu(x) = x / (1 + exp(-x)).

    gate_up: [T, 2F], the gate in the first F columns. Returns [T, F]. Raises ValueError for shapes.
    """
    return _gate_mul("silu_mul", gate_up, backend)


def gelu_mul(gate_up: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """gelu(gate) * up in float32, rounded once; gelu(x) = x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).

    Shapes and errors are those of silu_mul.
    """
    return _gate_mul("gelu_mul", gate_up, backend)


def _gate_mul(op: str, gate_up: torch.Tensor, backend: Backend | None) -> torch.Tensor:
    check_shape("gate_up", gate_up, (None, None))
    check_rows("gate_up", gate_up)
    num_tokens, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up has {columns} columns, expected an even number")
    out = torch.empty((num_tokens, columns // 2), dtype=gate_up.dtype, device=gate_up.device)
    implementation("gates", op, gate_up, backend)(gate_up, out)
    return out
