"""What guesses the next tokens of sequences: the contract between the scheduler's side and n-grams or a draft model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One decoding sequence whose next tokens are to be guessed."""

    sequence_id: str
    token_ids: Seq[int]  # prompt, then output; the scheduler's own list, to be read during the call only
    num_prompt: int
    params: SamplingParams
    block_table: tuple[int, ...]  # covers `token_ids` and `num_drafts` more
    num_drafts: int  # at most; 0: none are wanted


class Proposer(Protocol):
    """Guesses need not be right: a wrong one costs time, never an answer. An exception is fatal to the engine."""

    @property
    def is_free(self) -> bool:
        """Whether a guess costs next to nothing, so that it is worth making only to see whether it was right."""
        ...

    @property
    def draft_s(self) -> float:
        """Seconds that guessing one token more for every sequence took lately; 0: next to nothing, or not measured."""
        ...

    def propose(self, requests: Seq[DraftRequest]) -> list[tuple[int, ...]]:
        """For each request at most `num_drafts` token ids of the model's vocabulary."""
        ...

    def forget(self, sequence_id: str) -> None:
        """The sequence has left the engine. Unknown ids are ignored."""
        ...
