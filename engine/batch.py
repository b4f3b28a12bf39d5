"""What crosses between the scheduler, the runner and the pod in one engine step. All frozen."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.sequence import FinishReason, SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the runner copies block `source` to `target` before it computes the batch."""

    source: int
    target: int


class ScheduledSequence(NamedTuple):
    """A run of one sequence's tokens to compute in this step.

    Tokens start .. start + len(token_ids) - 1 (positions in the sequence) attend to everything before them.
    `sample` is set when the last of them is the sequence's last token: then the runner draws the next one.

    `draft_ids` are guesses at the tokens after those, only ever behind a single token that is sampled. They are
    computed like tokens, each in the slot that it would have, and the runner draws after each of them too: as far as
    they are right, the step gives the tokens of several steps (engine/speculation/verify.py). KV of wrong guesses is
    written over later.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]  # covers at least start + len(token_ids) + len(draft_ids) tokens
    sample: bool
    params: SamplingParams
    prompt_ids: Seq[int]  # for penalties, and to tell its tokens from others
    output_ids: Seq[int]  # likewise, until the step is booked; its length is the position of the (first) token drawn
    draft_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Context length after `token_ids`; right drafts add to it."""
        return self.start + len(self.token_ids)

    @property
    def num_of_prompt(self) -> int:
        """How many of `token_ids`, the first ones, belong to the prompt."""
        return max(0, min(len(self.token_ids), len(self.prompt_ids) - self.start))


@dataclass(frozen=True, slots=True)
class Batch:
    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether nothing but single tokens and their drafts are computed."""
        return all(len(s.token_ids) == 1 for s in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Drafts included: all that is computed."""
        return sum(len(s.token_ids) + len(s.draft_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the pod must know of the model without holding it."""

    model_id: str
    weights_revision: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of activations
    kv_dtype: str  # of the KV cache: the same, or bfloat16, int8 or fp8


class Runner(Protocol):
    """Computes batches. The real one holds a model and torch tensors, the fake one a byte buffer."""

    @property
    def model(self) -> ModelInfo: ...

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        """The tokens drawn for each scheduled sequence; none where `sample` is not set.

        With drafts: one token more than there were right drafts before the first wrong one. KV of all tokens and drafts
        is written when it returns.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of a finished `hold` sequence, in token order, with their generations, until release_held()."""

    sequence_id: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int


class TokenEvent(NamedTuple):
    """One token of one sequence; a step gives several when drafts were right. Times are the engine clock's seconds."""

    sequence_id: str
    token: SampledToken
    finish_reason: FinishReason | None
    num_cached: int  # prompt tokens that were found in the prefix cache
    num_preemptions: int
    arrived_at: float  # add()/activate() was called
    first_scheduled_at: float
    at: float  # this token
    num_drafts: int = 0  # of the sequence, as of this step
    num_accepted: int = 0
    held: HeldBlocks | None = None  # with the token of a `hold` sequence that did not finish its answer


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks set aside for a sequence whose KV will arrive; the first `num_cached` tokens are here already."""

    sequence_id: str
    block_ids: tuple[int, ...]
    num_cached: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    num_waiting: int
    num_running: int
    num_waiting_tokens: int  # tokens still to prefill, running prefills included
    num_free_blocks: int  # free or evictable
    num_blocks: int
    num_held: int
    num_reserved: int
    step_s: float  # moving averages; 0 before the first
    prefill_tokens_per_s: float
    num_drafts: int = 0  # drafts verified since the start
    num_accepted: int = 0  # of these, the right ones
