"""Reference of kernels/block_copy.py: indexing."""

from __future__ import annotations

import torch


def copy_rows(source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]]; rows int64 [n]."""
    target[target_rows] = source[source_rows]
