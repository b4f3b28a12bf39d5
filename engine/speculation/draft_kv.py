"""Which slots of a draft model's KV cache hold what belongs there. Pure.

The draft's cache is a second array under the block ids of the first: same blocks, same slots, never transferred. So it
falls behind wherever the first one is filled without it: by a hand-off, a prefix hit, a copy, a prefill. A block that
got a new owner has a new generation (engine/block_manager.py), and the tokens in it under one generation only ever grow
in number. So the generation under which a block was written, and how many of its slots, say what is still to be done.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from engine.block_manager import Generations


class DraftSlots:
    """Borrows the engine's generations."""

    def __init__(self, generations: Generations, block_size: int) -> None:
        self._generations = generations
        self._block_size = block_size
        self._written_under = np.full(len(generations), -1, np.int64)
        self._num_written = np.zeros(len(generations), np.int64)

    def num_ready(self, block_table: Seq[int], num_tokens: int) -> int:
        """How many leading ones of a sequence's `num_tokens` tokens have their KV."""
        blocks = np.asarray(block_table[: -(-num_tokens // self._block_size)], np.int64)
        is_same = self._written_under[blocks] == self._generations_of(blocks)
        num_written = np.where(is_same, self._num_written[blocks], 0)
        incomplete = np.flatnonzero(num_written < self._block_size)
        if len(incomplete) == 0:
            return num_tokens
        first = int(incomplete[0])
        return min(first * self._block_size + int(num_written[first]), num_tokens)

    def wrote(self, block_table: Seq[int], start: int, end: int) -> None:
        """The KV of tokens start .. end - 1, which stay as they are, was written; all before them has theirs."""
        first = start // self._block_size
        blocks = np.asarray(block_table[first : -(-end // self._block_size)], np.int64)
        ends = end - self._block_size * np.arange(first, first + len(blocks))
        self._written_under[blocks] = self._generations_of(blocks)
        self._num_written[blocks] = np.minimum(ends, self._block_size)

    def _generations_of(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        generations: NDArray[np.int64] = np.asarray(self._generations)[blocks].astype(np.int64)
        return generations
