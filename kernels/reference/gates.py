"""Reference of kernels/gates.py."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kernels.reference.precision import widened


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out [T, F]. A sigmoid, because 1 + tanh cancels below 0."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    out.copy_(gate * torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)) * up)
