"""The batch of a step of decodes alone, in memory that the next such step uses again: most steps are of that kind."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from engine.batch import ScheduledSequence
from kernels.flat_batch import FlatBatch

TABLE_STEP = 16  # blocks by which tables grow wider


def only_decodes(sequences: Seq[ScheduledSequence]) -> bool:
    """Whether each computes one token and draws the next, without drafts."""
    return all(len(s.token_ids) == 1 and s.sample and not s.draft_ids for s in sequences)


class DecodeRows:
    """A row a sequence. What `batch` returns is valid until it is called again."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._width = 0
        self._known: list[tuple[int, ...]] = []  # the block table that each row holds
        self._make(0, 0)

    def batch(self, sequences: Seq[ScheduledSequence]) -> FlatBatch:
        """As engine.runner.flatten makes it, but for the tables' width. sequences: `only_decodes`."""
        size, longest = self._block_size, max(len(s.block_table) for s in sequences)
        if len(sequences) != len(self._known) or longest > self._width:
            self._make(len(sequences), -(-longest // TABLE_STEP) * TABLE_STEP)
        starts = [s.start for s in sequences]
        self._longs[0] = [s.token_ids[0] for s in sequences]
        self._longs[1] = starts
        self._longs[2] = [s.block_table[s.start // size] * size + s.start % size for s in sequences]
        self._context_lens[:] = self._longs[1] + 1
        for row, s in enumerate(sequences):
            if s.block_table is not self._known[row]:
                self._known[row] = s.block_table
                self._tables[row, : len(s.block_table)] = s.block_table
        return self._batch

    def _make(self, rows: int, width: int) -> None:
        """Entries of `_tables` past a sequence's blocks are anything: attention reads none past a context length."""
        self._width = width
        self._known = [()] * rows
        self._longs = np.zeros((3, rows), dtype=np.int64)
        self._context_lens = np.zeros(rows, dtype=np.int32)
        self._tables = np.zeros((rows, width), dtype=np.int32)
        token_ids, positions, slot_mapping = torch.from_numpy(self._longs)
        self._batch = FlatBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            sample_rows=torch.arange(rows),
            decode_block_tables=torch.from_numpy(self._tables),
            decode_context_lens=torch.from_numpy(self._context_lens),
            prefill_block_tables=torch.zeros((0, 0), dtype=torch.int32),
            prefill_context_lens=torch.zeros(0, dtype=torch.int32),
            prefill_cu_seqlens=torch.zeros(1, dtype=torch.int32),
        )
