"""One pod's engine: sequences in, one batch a step, token events out. The only object that a pod's engine thread calls.

A sequence reaches an answer on one of three paths, all with the same stop rules (engine/stopping.py):

    decode-only, colocated   add() ......................................... step() until finished
    prefill pod              add(hold=True), step() until its first token, held(), release_held()
    decode pod               reserve(), [KV arrives], activate(), .......... step() until finished

A replayed sequence (non-empty `output_ids`) takes any of them; its replayed tokens count as output everywhere.

**Errors.** A ValueError or KeyError of a call concerns that call alone and changes nothing. When the runner fails, the
KV of every sequence in the batch is in doubt and some of them may share blocks, so the whole engine stops: `step`
raises EngineFailed naming all sequences that will get no answer, and so does every later call that would need the
runner. Nothing was lost from the books: abort, held, release_held, load and check_invariants go on working, so that
the pod can tell every router, free everything and exit.

Not thread-safe, and not reentrant from the runner. The caller must not abort a reserved sequence while a transfer into
its blocks may still write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.batch import Batch, EngineLoad, HeldBlocks, Reservation, Runner, ScheduledSequence, TokenEvent
from engine.block_manager import BlockManager, Generations
from engine.meter import StepMeter
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, SampledToken, Sequence, SequenceSpec
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator
from engine.stopping import finish_reason
from engine.validation import validate_spec

T = TypeVar("T")


class EngineFailed(Exception):
    """The runner or the proposer raised (see __cause__) or broke its contract.

    `sequence_ids` were running, waiting or reserved.
    """

    def __init__(self, message: str, sequence_ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.sequence_ids = sequence_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ValueError when a size is out of range."""

    block_size: int = 16  # tokens
    num_blocks: int
    max_num_seqs: int = 64  # running and reserved at once
    max_batched_tokens: int = 512  # of one step
    prefix_cache: bool = True
    num_draft_tokens: int = 8  # of one sequence in one step, at most, where there is a proposer

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens = {self.max_batched_tokens}: must be at least max_num_seqs ({self.max_num_seqs}), "
                "or decodes could starve prefills"
            )


@dataclass(slots=True)
class _Times:
    arrived_at: float
    first_scheduled_at: float | None = None


class EngineCore:
    """See the module's text. Times are `clock`'s seconds."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        generations: Generations | None = None,
        proposer: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`generations`: one integer a block, in memory that other pods may read; see engine/block_manager.py.

        `proposer`: guesses tokens for decodes to verify several in one step. Answers do not depend on it.
        """
        model = runner.model
        self._runner = runner
        self._config = config
        self._clock = clock
        self._blocks = BlockManager(
            config.num_blocks, config.block_size, generations=generations, prefix_cache=config.prefix_cache
        )
        self._speculator: Speculator | None = None
        if proposer is not None:
            self._speculator = Speculator(
                proposer, max_drafts=config.num_draft_tokens, max_model_len=model.max_model_len
            )
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            model_key=f"{model.model_id}@{model.weights_revision}/{model.dtype}/{model.kv_dtype}",
            speculator=self._speculator,
        )
        self._times: dict[str, _Times] = {}
        self._meter = StepMeter()
        self._num_drafts = self._num_accepted = 0
        self._failure: str | None = None

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence can have here: the model's context, or what the blocks can hold."""
        return min(self._runner.model.max_model_len, self._config.num_blocks * self._config.block_size + 1)

    @property
    def has_work(self) -> bool:
        """Whether step() would compute something; False also while all that wait need blocks that are held."""
        return self._failure is None and self._scheduler.has_work

    def add(self, spec: SequenceSpec, *, hold: bool = False) -> None:
        """Queues a sequence to be computed here from its first token.

        `hold`: it stops after the first token it samples and its blocks stay for a hand-off, unless that token
        finished the answer. ValueError: it can never run here, or its id is in use. EngineFailed.
        """
        self._check_new(spec)
        self._check_capacity(spec, _num_prefill_tokens(spec) if hold else self._max_kv_tokens(spec))
        self._scheduler.add(spec, hold=hold)
        self._times[spec.sequence_id] = _Times(self._clock())

    def reserve(self, spec: SequenceSpec) -> Reservation | None:
        """Sets aside blocks for `spec`'s tokens and one more for output; None: not enough are free now.

        Blocks of a cached prefix are shared, and must not be written. ValueError: it can never run here, or its id is
        in use. EngineFailed.
        """
        self._check_new(spec)
        max_kv_tokens = self._max_kv_tokens(spec)
        self._check_capacity(spec, max_kv_tokens)
        num_tokens = _num_prefill_tokens(spec) + self._config.block_size
        return self._scheduler.reserve(spec, self._blocks.blocks_for(min(num_tokens, max_kv_tokens)))

    def activate(self, spec: SequenceSpec) -> None:
        """Continues a reserved sequence: its blocks now hold the KV of all tokens but the last of `output_ids`.

        KeyError: no reservation. ValueError: not the reserved sequence plus one token, or that token had finished the
        answer; the reservation stays. EngineFailed.
        """
        self._check_running()
        reserved = self._scheduler.reserved[spec.sequence_id].spec
        if spec.prompt_ids != reserved.prompt_ids or spec.output_ids[:-1] != reserved.output_ids or not spec.output_ids:
            raise ValueError(
                f"sequence_id = {spec.sequence_id!r}: must have the tokens reserved and one output token more"
            )
        validate_spec(spec, self._runner.model)
        if self._finish_reason(spec, len(spec.output_ids), spec.output_ids[-1]) is not None:
            raise ValueError(f"output_ids ends with {spec.output_ids[-1]}: that token finished the answer")
        self._scheduler.activate(spec)
        self._times[spec.sequence_id] = _Times(self._clock())

    def abort(self, sequence_id: str) -> bool:
        """Forgets a waiting, running, held or reserved sequence and frees everything. False: unknown."""
        self._times.pop(sequence_id, None)
        return self._scheduler.remove(sequence_id)

    def held(self, sequence_id: str) -> HeldBlocks:
        """KeyError: nothing is held under this id."""
        seq = self._scheduler.held[sequence_id]
        return HeldBlocks(
            sequence_id, self._blocks.table(sequence_id), self._blocks.generations(sequence_id), seq.num_computed
        )

    def release_held(self, sequence_id: str) -> bool:
        """Frees the blocks of a held sequence; they stay cached. False: nothing is held under this id."""
        return sequence_id in self._scheduler.held and self._scheduler.remove(sequence_id)

    def step(self) -> list[TokenEvent]:
        """Computes one batch; the tokens it sampled. Empty when nothing could run or only parts of prompts did.

        EngineFailed: see the module's text.
        """
        self._check_running()
        started_at = self._clock()
        batch = self._or_fail("a proposer of drafts", self._scheduler.schedule)
        if not batch.sequences:
            return []
        scheduled_at = self._clock()
        tokens = self._or_fail("the runner", lambda: self._execute(batch))
        now = self._clock()
        self._meter.record(batch, now - started_at)
        if self._speculator is not None and batch.is_decode:
            self._speculator.record(batch.num_tokens, now - scheduled_at)
        return [
            event
            for scheduled, drawn in zip(batch.sequences, tokens, strict=True)
            for event in self._advance(scheduled, drawn, started_at, now)
        ]

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        prefilling = [*scheduler.waiting, *(seq for seq in scheduler.running.values() if not seq.is_decoding)]
        return EngineLoad(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_waiting_tokens=sum(seq.num_missing for seq in prefilling),
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._config.num_blocks,
            num_held=len(scheduler.held),
            num_reserved=len(scheduler.reserved),
            step_s=self._meter.step_s,
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            num_drafts=self._num_drafts,
            num_accepted=self._num_accepted,
        )

    def check_invariants(self) -> None:
        """AssertionError naming what leaked or is counted wrongly."""
        self._scheduler.check_invariants()
        timed = {seq.id for seq in self._scheduler.waiting} | set(self._scheduler.running)
        assert self._times.keys() == timed, f"times and sequences differ: {sorted(self._times.keys() ^ timed)}"

    def _execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        tokens = self._runner.execute(batch)
        _check_tokens(batch, tokens, self._runner.model.vocab_size)
        return tokens

    def _or_fail(self, who: str, compute: Callable[[], T]) -> T:
        """Whatever `compute` raises stops the engine."""
        try:
            return compute()
        except Exception as error:
            self._failure = f"{who} failed: {type(error).__name__}: {error}"
            raise self._failed() from error

    def _advance(
        self, scheduled: ScheduledSequence, drawn: tuple[SampledToken, ...], started_at: float, now: float
    ) -> list[TokenEvent]:
        """Books what one sequence's part of a batch has computed; what was drawn behind the answer's end is dropped."""
        seq, times = self._scheduler.running[scheduled.sequence_id], self._times[scheduled.sequence_id]
        if times.first_scheduled_at is None:
            times.first_scheduled_at = started_at
        if scheduled.draft_ids:
            self._count(seq, len(scheduled.draft_ids), len(drawn) - 1)
        events: list[TokenEvent] = []
        reason = None
        for token in drawn:
            seq.append(token.token_id)
            reason = (
                self._finish_reason(seq.spec, seq.num_output, token.token_id) if token.finite else FinishReason.FAILED
            )
            events.append(_event(seq, token, reason, times, now))
            if reason is not None:
                break
        self._scheduler.computed(seq, scheduled.end + max(0, len(events) - 1))  # a right draft's KV is its token's
        if self._speculator is not None and events:
            self._speculator.observe(seq.id, seq.token_ids[-len(events) :])
        if reason is not None:
            self.abort(seq.id)
        elif events and seq.hold:
            del self._times[seq.id]
            self._scheduler.hold(seq)
            events[-1] = events[-1]._replace(held=self.held(seq.id))
        return events

    def _count(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        seq.num_drafts += num_drafts
        seq.num_accepted += num_accepted
        self._num_drafts += num_drafts
        self._num_accepted += num_accepted

    def _finish_reason(self, spec: SequenceSpec, num_output: int, token_id: int) -> FinishReason | None:
        return finish_reason(
            spec.params,
            token_id,
            num_prompt=len(spec.prompt_ids),
            num_output=num_output,
            max_model_len=self._runner.model.max_model_len,
        )

    def _max_kv_tokens(self, spec: SequenceSpec) -> int:
        """Tokens whose KV the whole answer needs: all but the last."""
        return min(len(spec.prompt_ids) + spec.params.max_tokens, self._runner.model.max_model_len) - 1

    def _check_new(self, spec: SequenceSpec) -> None:
        self._check_running()
        validate_spec(spec, self._runner.model)
        if spec.sequence_id in self._scheduler:
            raise ValueError(f"sequence_id = {spec.sequence_id!r}: is in use")

    def _check_capacity(self, spec: SequenceSpec, num_tokens: int) -> None:
        num_slots = self._config.num_blocks * self._config.block_size
        if num_tokens > num_slots:
            raise ValueError(
                f"prompt_ids has {len(spec.prompt_ids)} tokens and max_tokens = {spec.params.max_tokens}: "
                f"their KV needs {num_tokens} slots, this pod has {num_slots}"
            )

    def _check_running(self) -> None:
        if self._failure is not None:
            raise self._failed()

    def _failed(self) -> EngineFailed:
        scheduler = self._scheduler
        waiting = (seq.id for seq in scheduler.waiting)
        return EngineFailed(self._failure or "", (*scheduler.running, *waiting, *scheduler.reserved))


def _num_prefill_tokens(spec: SequenceSpec) -> int:
    return len(spec.prompt_ids) + len(spec.output_ids)


def _check_tokens(batch: Batch, tokens: list[tuple[SampledToken, ...]], vocab_size: int) -> None:
    """Raises ValueError when a runner broke its contract."""
    for scheduled, drawn in zip(batch.sequences, tokens, strict=True):
        if len(drawn) == 1 and scheduled.sample and 0 <= drawn[0].token_id < vocab_size:
            continue  # as most do
        ids = tuple(token.token_id for token in drawn)
        if scheduled.sample is (not ids):
            raise ValueError(f"sequence {scheduled.sequence_id}: sample = {scheduled.sample}, tokens = {ids}")
        if len(ids) > 1 + len(scheduled.draft_ids) or ids[:-1] != scheduled.draft_ids[: len(ids) - 1]:
            raise ValueError(
                f"sequence {scheduled.sequence_id}: tokens = {ids}: must be drafts {scheduled.draft_ids} and one more"
            )
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise ValueError(f"sequence {scheduled.sequence_id}: token_ids = {ids}: must be below {vocab_size}")


def _event(seq: Sequence, token: SampledToken, reason: FinishReason | None, times: _Times, now: float) -> TokenEvent:
    assert times.first_scheduled_at is not None, f"sequence {seq.id} was computed but never scheduled"
    return TokenEvent(
        sequence_id=seq.id,
        token=token,
        finish_reason=reason,
        num_cached=seq.num_cached,
        num_preemptions=seq.num_preemptions,
        arrived_at=times.arrived_at,
        first_scheduled_at=times.first_scheduled_at,
        at=now,
        num_drafts=seq.num_drafts,
        num_accepted=seq.num_accepted,
    )
