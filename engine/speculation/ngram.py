"""Guesses by prompt lookup: what followed the last time that the sequence's newest tokens occurred in it. Pure.

Answers that copy from their prompt (summaries, edits, code, extraction) or repeat themselves are guessed well, for
microseconds a step: an index of the sequence's n-grams grows with it, nothing is ever scanned.
After "prompt lookup decoding" (Saxena, 2023) and LLMA (https://arxiv.org/abs/2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.speculation.proposer import DraftRequest

TOKENS_PER_STEP = 1024  # a long prompt is indexed over several steps, so that it does not hold up other sequences


class NgramIndex:
    """Where each n-gram of one sequence occurred last, for min_n <= n <= max_n."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its last occurrence
        self._num_indexed = 1  # positions that were entered as followers

    def extend(self, token_ids: Seq[int]) -> bool:
        """Takes in up to TOKENS_PER_STEP tokens of the sequence that it has not seen. False: there are more."""
        end = min(len(token_ids), self._num_indexed + TOKENS_PER_STEP)
        for position in range(self._num_indexed, end):
            for n in self._sizes:
                if n <= position:
                    self._followers[tuple(token_ids[position - n : position])] = position
        self._num_indexed = max(self._num_indexed, end)
        return end == len(token_ids)

    def propose(self, token_ids: Seq[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens: those after the last occurrence of the longest suffix that occurred before.

        A continuation that reaches the sequence's end goes on with itself: what repeats with a period is guessed so.
        """
        for n in self._sizes:
            start = self._followers.get(tuple(token_ids[-n:]))
            if start is not None:
                period = len(token_ids) - start
                return tuple(token_ids[start + i % period] for i in range(count))
        return ()


class NgramProposer:
    """An `engine.speculation.proposer.Proposer`. Raises ValueError unless 1 <= min_n <= max_n."""

    is_free = True
    draft_s = 0.0

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"ngram_min = {min_n}, ngram_max = {max_n}: must be 1 <= ngram_min <= ngram_max")
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> tuple[int, ...]:
        index = self._indexes.get(request.sequence_id)
        if index is None:
            index = self._indexes[request.sequence_id] = NgramIndex(self._min_n, self._max_n)
        return index.propose(request.token_ids, request.num_drafts) if index.extend(request.token_ids) else ()

    def forget(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)
