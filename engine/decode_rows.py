"""Steps of decodes alone, in memory that the next such step uses again: most steps are of that kind.

Between two steps a model's weights have passed through the processor's caches, so all that Python and torch do then
comes from memory: an op of torch that takes 3 us again and again takes 60. So nothing is made anew that need not be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.batch import ScheduledSequence
from engine.sampler import Sampler
from engine.sequence import SampledToken
from kernels.flat_batch import FlatBatch

TABLE_STEP = 16  # blocks by which tables grow wider

Step = Callable[[], torch.Tensor]  # computes a batch as it then stands; logits [R, V], valid until the next call


def only_decodes(sequences: Seq[ScheduledSequence]) -> bool:
    """Whether each computes one token behind its prompt and draws the next, without drafts."""
    return all(len(s.token_ids) == 1 and s.num_of_prompt == 0 and s.sample and not s.draft_ids for s in sequences)


class DecodeRows:
    """The inputs, a row a sequence. What `batch` returns is valid until it is called again."""

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
        for row, s in enumerate(sequences):
            table, start = s.block_table, s.start
            self._token_ids[row] = s.token_ids[0]
            self._positions[row] = start
            self._slots[row] = table[start // size] * size + start % size
            self._context_lens[row] = start + 1
            if table is not self._known[row]:
                self._known[row] = table
                self._tables[row, : len(table)] = table
        return self._batch

    def _make(self, rows: int, width: int) -> None:
        """Entries of `_tables` past a sequence's blocks are anything: attention reads none past a context length.

        Arrays of ctypes: numpy takes longer to write a few numbers.
        """
        self._width = width
        self._known = [()] * rows
        self._token_ids, self._positions, self._slots = ((ctypes.c_int64 * rows)() for _ in range(3))
        self._context_lens = (ctypes.c_int32 * rows)()
        self._tables = np.zeros((rows, width), dtype=np.int32)
        self._batch = FlatBatch(
            token_ids=_tensor(self._token_ids),
            positions=_tensor(self._positions),
            slot_mapping=_tensor(self._slots),
            sample_rows=torch.arange(rows),
            decode_block_tables=torch.from_numpy(self._tables),
            decode_context_lens=_tensor(self._context_lens),
            prefill_block_tables=torch.zeros((0, 0), dtype=torch.int32),
            prefill_context_lens=torch.zeros(0, dtype=torch.int32),
            prefill_cu_seqlens=torch.zeros(1, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    batch: FlatBatch
    compute: Step


class DecodeSteps:
    """Whole steps over `DecodeRows`. `prepare` makes a step of a batch that is used again."""

    def __init__(self, block_size: int, prepare: Callable[[FlatBatch], Step], eos_token_ids: frozenset[int]) -> None:
        self._rows = DecodeRows(block_size)
        self._prepare = prepare
        self._eos_token_ids = eos_token_ids
        self._prepared: _Prepared | None = None
        self._sampler: Sampler | None = None

    def tokens(self, sequences: Seq[ScheduledSequence]) -> list[SampledToken]:
        """The next token of each. sequences: `only_decodes`."""
        batch, prepared = self._rows.batch(sequences), self._prepared
        if prepared is None or prepared.batch is not batch:
            prepared = self._prepared = _Prepared(batch, self._prepare(batch))
        logits, sampler = prepared.compute(), self._sampler
        if sampler is None or sampler.logits is not logits:
            sampler = self._sampler = Sampler(logits, self._eos_token_ids)
        return sampler.sample(sequences)


def _tensor(array: ctypes.Array[Any]) -> torch.Tensor:
    """The same memory."""
    return torch.from_numpy(np.ctypeslib.as_array(array))
