"""CPU implementation of kernels/block_copy.py: block_copy.h."""

from __future__ import annotations

import torch

from kernels.cpu.library import library


def copy_rows(source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]], without a copy between; uint8 tensors, rows int64 [n]."""
    library().copy_rows(
        *(source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0), source.shape[1]),
        *(source_rows.data_ptr(), target_rows.data_ptr(), source_rows.shape[0], torch.get_num_threads()),
    )
