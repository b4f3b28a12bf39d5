"""Triton implementation of kernels/block_copy.py: a few programs copy everything.

A transfer runs beside the step that computes the next tokens. Programs enough to fill the device would hold up that
step's own; 16 of them leave it 9 in 10 of its multiprocessors and, with 16 KiB in flight each, can still move more
than the network takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 16
_VECTOR_BYTES = 16  # the widest load of a thread
_VECTORS = 1024  # per program and iteration


@triton.jit
def copy_rows_kernel(
    source_ptr,  # rows of row_vectors * WORDS words, source_stride vectors apart
    target_ptr,  # likewise
    source_row_ptr,  # int64 [num_rows]
    target_row_ptr,  # likewise
    num_rows,
    row_vectors,
    source_stride,
    target_stride,
    WORDS: tl.constexpr,  # of a vector; strides count vectors, so that the compiler knows that rows start at one
    VECTORS: tl.constexpr,
):
    """Program p copies pieces p, p + P, p + 2P, ... of VECTORS vectors."""
    pieces = tl.cdiv(row_vectors, VECTORS)
    for piece in range(tl.program_id(0), num_rows * pieces, tl.num_programs(0)):
        row = piece // pieces
        word = (piece % pieces) * (VECTORS * WORDS) + tl.arange(0, VECTORS * WORDS)
        mask = word < row_vectors * WORDS
        source = source_ptr + tl.load(source_row_ptr + row) * source_stride * WORDS
        target = target_ptr + tl.load(target_row_ptr + row) * target_stride * WORDS
        tl.store(target + word, tl.load(source + word, mask=mask, other=0), mask=mask)


def copy_rows(source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]]; uint8 tensors, rows int64 [n]."""
    aligned = all(
        number % _VECTOR_BYTES == 0
        for tensor in (source, target)
        for number in (tensor.data_ptr(), tensor.stride(0), tensor.shape[1])
    )
    if aligned:
        source, target = source.view(torch.int32), target.view(torch.int32)
    words = _VECTOR_BYTES // 4 if aligned else 1
    num_rows, row_vectors = source_rows.shape[0], source.shape[1] // words
    pieces = num_rows * triton.cdiv(row_vectors, _VECTORS)
    copy_rows_kernel[(min(_PROGRAMS, pieces),)](
        *(source, target, source_rows, target_rows, num_rows, row_vectors),
        *(source.stride(0) // words, target.stride(0) // words),
        WORDS=words,
        VECTORS=_VECTORS,
        num_warps=8,
    )
