"""Moves whole KV blocks: scattered blocks into a contiguous transfer buffer, back, and one block onto another.

Blocks are rows of bytes here: one block's KV of all layers, with whatever scales it carries. Block ids come from the
host, where block tables live, so they are checked on every device before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kernels.checks import check_dtype, check_rows, check_shape
from kernels.dispatch import Backend, implementation

_CPU_DTYPES = (torch.uint8,)


def gather_blocks(
    blocks: torch.Tensor, block_ids: Sequence[int], buffer: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """Copies block block_ids[i] to row i of the buffer.

    blocks: uint8 [N, block_bytes]; buffer: uint8 [len(block_ids), block_bytes], on the same device and apart from it.
    A block may be gathered twice. Raises ValueError or TypeError for shapes and dtypes, IndexError for a block id.
    """
    _check(blocks, "buffer", buffer, len(block_ids))
    _check_ids("block_ids", block_ids, blocks)
    _copy(blocks, buffer, block_ids, range(len(block_ids)), backend)


def scatter_blocks(
    buffer: torch.Tensor, blocks: torch.Tensor, block_ids: Sequence[int], *, backend: Backend | None = None
) -> None:
    """Copies row i of the buffer to block block_ids[i]: what gather_blocks did, backwards.

    Raises as gather_blocks does, and ValueError for a block id that occurs twice.
    """
    _check(blocks, "buffer", buffer, len(block_ids))
    _check_ids("block_ids", block_ids, blocks)
    _check_distinct("block_ids", block_ids)
    _copy(buffer, blocks, range(len(block_ids)), block_ids, backend)


def copy_blocks(
    blocks: torch.Tensor, sources: Sequence[int], targets: Sequence[int], *, backend: Backend | None = None
) -> None:
    """Copies block sources[i] to block targets[i], as if every source were read before any target is written.

    Raises as scatter_blocks does, and ValueError unless there are as many targets as sources.
    """
    _check(blocks, "blocks", blocks, None)
    if len(sources) != len(targets):
        raise ValueError(f"targets has {len(targets)} entries, expected {len(sources)} as sources has")
    _check_ids("sources", sources, blocks)
    _check_ids("targets", targets, blocks)
    _check_distinct("targets", targets)
    if set(sources).isdisjoint(targets):
        _copy(blocks, blocks, sources, targets, backend)
    else:  # rows are copied in no particular order
        buffer = blocks.new_empty((len(sources), blocks.shape[1]))
        _copy(blocks, buffer, sources, range(len(sources)), backend)
        _copy(buffer, blocks, range(len(sources)), targets, backend)


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: Sequence[int],
    target_rows: Sequence[int],
    backend: Backend | None,
) -> None:
    if source_rows and source.shape[1]:
        rows = torch.tensor([[*source_rows], [*target_rows]], dtype=torch.int64).to(source.device)
        run = implementation("block_copy", "copy_rows", source, backend, cpu_dtypes=_CPU_DTYPES)
        run(source, target, rows[0], rows[1])


def _check(blocks: torch.Tensor, name: str, other: torch.Tensor, num_rows: int | None) -> None:
    check_shape("blocks", blocks, (None, None))
    check_shape(name, other, (num_rows, blocks.shape[1]))
    for label, tensor in (("blocks", blocks), (name, other)):
        check_dtype(label, tensor, torch.uint8)
        check_rows(label, tensor)
    if other.device != blocks.device:
        raise ValueError(f"{name} is on {other.device}, expected {blocks.device} as blocks is")


def _check_ids(name: str, ids: Collection[int], blocks: torch.Tensor) -> None:
    num_blocks = blocks.shape[0]
    if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
        raise IndexError(f"{name} holds {min(ids)} .. {max(ids)}: must lie in 0 .. {num_blocks - 1}")


def _check_distinct(name: str, ids: Sequence[int]) -> None:
    if len(set(ids)) != len(ids):
        twice = next(block for i, block in enumerate(ids) if block in ids[:i])
        raise ValueError(f"{name} holds {twice} twice: each block can be written once")
