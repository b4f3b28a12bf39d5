"""Which tokens of which sequences are computed in the next step, and who gives way when blocks run out. Pure.

    add ──► waiting ──admit──► running ──finish──► (gone)
               ▲                  │  └──hold──► held ──release──► (gone)
               └─────preempt──────┘
    reserve ──► reserved ──activate──► running

Waiting sequences own no blocks; running, held and reserved ones own a block table under their id. One step
(continuous batching with chunked prefill, as in Orca, https://www.usenix.org/conference/osdi22/presentation/yu, and
Sarathi-Serve, https://arxiv.org/abs/2403.02310):

1. Every decoding sequence gets one token, in (priority, arrival) order, and drafts of those that may follow when
   somebody guesses them (engine/speculation/): in at most half of what is then left of the budget, and never in blocks
   that anybody waits for.
2. The rest of the token budget goes to prefills in (priority, arrival) order, running or waiting. The first waiting
   sequence that cannot be admitted keeps all later ones waiting, so that a large one is not passed for ever.
3. A prompt that the rest cannot finish takes all of it, but for at most half: there later ones of its priority pass it,
   in order, if that finishes them. So no prompt gets less than half of what it would get alone; and one that half a
   budget finishes waits for no more steps than there are prompts before it, however long those are, because a step
   that does not finish it finishes one of those. What waits for blocks in vain is still passed by nobody: rule 2.

When a decoding sequence needs a block and none is free, the running sequence that is last in that order is preempted,
which may be the one that asked: it gives up its blocks, keeps its tokens and computes them again later. The first in
order is never preempted by another, so it always advances; and as no sequence is accepted that cannot fit alone, every
sequence ends. Budget >= max_num_seqs: decodes can never take the last token of the budget from a running prefill.

A reservation takes its blocks and its place among max_num_seqs for good: it is never preempted and runs at once when
activated. It is granted only if enough blocks remain for each running decode's next one, so that it does not cause a
preemption at once, and for the waiting sequences that come before it, so that a stream of hand-offs cannot starve them.

Blocks taken for drafts go back when the step is computed, but for those that right drafts have filled: between steps
nobody owns a block that it would not own without speculation.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter

from engine.batch import Batch, BlockCopy, Reservation, ScheduledSequence
from engine.block_hash import extend_hashes, root_hash
from engine.block_manager import BlockManager, Demand
from engine.sequence import Sequence, SequenceSpec, SequenceState
from engine.speculation.proposer import DraftRequest
from engine.speculation.speculator import Speculator

_sort_key = attrgetter("sort_key")


@dataclass(slots=True)
class _Step:
    """A batch in the making."""

    budget: int  # tokens left
    is_blocked: bool = False  # a waiting sequence found no room: later ones keep waiting
    sequences: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class Scheduler:
    """Owns every sequence of one engine and calls the block manager; specs were validated by its owner."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        model_key: str = "",
        speculator: Speculator | None = None,
    ) -> None:
        """`model_key` separates the prefix caches of different models. ValueError: the budget could starve prefills."""
        if not 1 <= max_num_seqs <= max_batched_tokens:
            raise ValueError(
                f"max_num_seqs = {max_num_seqs}: must be 1 .. max_batched_tokens ({max_batched_tokens}), "
                "or decodes could starve prefills"
            )
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._model_key = model_key
        self._speculator = speculator
        self._num_blocks_before_drafts: dict[str, int] = {}  # of sequences that got some in the step under way
        self._num_arrivals = 0
        self._waiting: list[Sequence] = []  # by sort_key
        self.running: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.reserved: dict[str, Sequence] = {}

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """In the order in which they will be admitted."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would do something. A waiting sequence that cannot be admitted is not work by itself."""
        return bool(self.running) or bool(self._waiting and self._can_admit(self._waiting[0]))

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._blocks.owners or any(seq.id == sequence_id for seq in self._waiting)

    def add(self, spec: SequenceSpec, *, hold: bool = False) -> None:
        self._wait(Sequence(spec, self._next_arrival(), hold=hold))

    def reserve(self, spec: SequenceSpec, num_blocks: int) -> Reservation | None:
        """Blocks and a place for a sequence whose KV will arrive from elsewhere; None when there are not enough."""
        seq = Sequence(spec, self._num_arrivals)
        ahead = [other for other in self._waiting if other.sort_key < seq.sort_key]
        if self._num_places - len(ahead) < 1:
            return None
        num_blocks_ahead = sum(self._blocks.blocks_for(other.num_tokens) for other in ahead)
        demand = Demand(
            hashes=self._hashes(seq, seq.num_tokens),
            num_blocks=num_blocks,
            max_cached_tokens=seq.num_tokens,
            keep_free=self._num_decodes + num_blocks_ahead,
        )
        num_cached = self._blocks.allocate(seq.id, demand)
        if num_cached is None:
            return None
        self._num_arrivals += 1
        seq.num_cached = min(num_cached, seq.num_prompt)
        self.reserved[seq.id] = seq
        return Reservation(seq.id, self._blocks.table(seq.id), num_cached)

    def activate(self, spec: SequenceSpec) -> None:
        """Runs a reserved sequence; its blocks hold the KV of all its tokens but the last. KeyError: not reserved."""
        reserved = self.reserved.pop(spec.sequence_id)
        seq = Sequence(spec, reserved.arrival, SequenceState.RUNNING, block_hashes=reserved.block_hashes)
        seq.num_cached = reserved.num_cached
        self.running[seq.id] = seq
        self.computed(seq, seq.num_tokens - 1)

    def schedule(self) -> Batch:
        """The next step; empty when nothing can run. Every sequence in it must then go through `computed`."""
        step = _Step(self._max_batched_tokens)
        self._schedule_decodes(step)
        if self._waiting or len(step.sequences) < len(self.running):
            self._schedule_prefills(step)
        return Batch(tuple(step.sequences), tuple(step.copies))

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in the cache: their full blocks can be matched from here on."""
        seq.num_computed = num_tokens
        if self._blocks.can_commit(seq.id, num_tokens):
            self._blocks.commit(seq.id, self._hashes(seq, num_tokens))
        if (num_blocks := self._num_blocks_before_drafts.pop(seq.id, None)) is not None:
            self._blocks.shrink(seq.id, max(num_blocks, self._blocks.blocks_for(num_tokens)))

    def hold(self, seq: Sequence) -> None:
        """Ends a running sequence and keeps its blocks until `remove`."""
        seq.state = SequenceState.FINISHED
        self.held[seq.id] = self.running.pop(seq.id)

    def remove(self, sequence_id: str) -> bool:
        """Forgets a sequence in any state and frees what it owns. False: unknown."""
        if self._speculator is not None:
            self._speculator.forget(sequence_id)
        for index, seq in enumerate(self._waiting):
            if seq.id == sequence_id:
                seq.state = SequenceState.FINISHED
                del self._waiting[index]
                return True
        for sequences in (self.running, self.held, self.reserved):
            if sequence_id in sequences:
                sequences.pop(sequence_id).state = SequenceState.FINISHED
                self._blocks.free(sequence_id)
                return True
        return False

    @property
    def _num_places(self) -> int:
        """How many more sequences may run."""
        return self._max_num_seqs - len(self.running) - len(self.reserved)

    @property
    def _num_decodes(self) -> int:
        """Running sequences that will need another block before long."""
        return sum(1 for seq in self.running.values() if not seq.hold)

    def _next_arrival(self) -> int:
        self._num_arrivals += 1
        return self._num_arrivals - 1

    def _wait(self, seq: Sequence) -> None:
        bisect.insort(self._waiting, seq, key=_sort_key)

    def _hashes(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Of the full blocks among the first `num_tokens` tokens."""
        block_size = self._blocks.block_size
        num_blocks = num_tokens // block_size if self._blocks.prefix_cache else 0
        if num_blocks > len(seq.block_hashes):
            root = root_hash(self._model_key, seq.spec.cache_salt)
            extend_hashes(seq.block_hashes, root, seq.token_ids, block_size=block_size, num_blocks=num_blocks)
        return seq.block_hashes[:num_blocks]

    def _schedule_decodes(self, step: _Step) -> None:
        decodes = [
            seq
            for seq in sorted(self.running.values(), key=_sort_key)
            if seq.state is SequenceState.RUNNING and seq.is_decoding and self._make_room(seq)
        ]
        drafts = self._drafts(decodes, (step.budget - len(decodes)) // 2)
        for seq, draft_ids in zip(decodes, drafts, strict=True):
            self._take(seq, step, draft_ids)

    def _drafts(self, decodes: Seq[Sequence], budget: int) -> list[tuple[int, ...]]:
        """Guesses at what follows each of `decodes`, `budget` tokens in all, with room for their KV."""
        if self._speculator is None or not decodes:
            return [()] * len(decodes)
        requests: list[DraftRequest] = []
        for seq, depth in zip(decodes, self._speculator.depths(decodes), strict=True):
            num_drafts = self._make_room_for_drafts(seq, min(depth, budget))
            budget -= num_drafts
            table = self._blocks.table(seq.id)
            requests.append(DraftRequest(seq.id, seq.token_ids, seq.num_prompt, seq.spec.params, table, num_drafts))
        return self._speculator.propose(requests)

    def _make_room_for_drafts(self, seq: Sequence, num_drafts: int) -> int:
        """Extends `seq`'s table if nobody needs the blocks; how many of `num_drafts` drafts then have room."""
        if num_drafts == 0:
            return 0
        num_blocks = len(self._blocks.table(seq.id))
        if not self._waiting and self._blocks.grow(seq.id, seq.num_tokens + num_drafts):
            self._num_blocks_before_drafts[seq.id] = num_blocks
            return num_drafts
        return min(num_drafts, num_blocks * self._blocks.block_size - seq.num_tokens)

    def _schedule_prefills(self, step: _Step) -> None:
        prefilling = sorted((s for s in self.running.values() if not s.is_decoding), key=_sort_key)
        in_order = heapq.merge(prefilling, self.waiting, key=_sort_key)
        for seq in in_order:
            if step.budget == 0:
                return
            if self._is_admitted(seq, step):
                if seq.num_missing > step.budget:
                    self._let_pass(seq, in_order, step)
                self._take(seq, step)

    def _let_pass(self, long: Sequence, later: Iterator[Sequence], step: _Step) -> None:
        """Gives those of `later` that fit whole up to half of what is left before `long` takes the rest."""
        share = step.budget // 2
        for seq in later:
            if share == 0 or seq.spec.priority != long.spec.priority:
                return
            if self._num_to_compute(seq) > share or not self._is_admitted(seq, step):
                continue
            if seq.num_missing <= share:  # a cached block that there was no room to copy is computed again
                share -= seq.num_missing
                self._take(seq, step)

    def _is_admitted(self, seq: Sequence, step: _Step) -> bool:
        """Whether `seq` runs, if need be from now on."""
        if seq.state is SequenceState.WAITING:
            step.is_blocked = step.is_blocked or not self._admit(seq)
        return seq.state is SequenceState.RUNNING

    def _num_to_compute(self, seq: Sequence) -> int:
        """`seq.num_missing`, of a waiting sequence once it is admitted, as far as can be told before."""
        if seq.state is SequenceState.RUNNING:
            return seq.num_missing
        num_matched = len(self._blocks.match(self._hashes(seq, seq.num_tokens))) * self._blocks.block_size
        return max(1, seq.num_tokens - num_matched)

    def _take(self, seq: Sequence, step: _Step, draft_ids: tuple[int, ...] = ()) -> None:
        """Puts as many of `seq`'s tokens into the step as the budget allows, and its drafts, which fit."""
        start = seq.num_computed
        end = min(seq.num_tokens, start + step.budget)
        step.copies += self._blocks.make_writable(seq.id, start, end + len(draft_ids))
        step.budget -= end - start + len(draft_ids)
        step.sequences.append(
            ScheduledSequence(
                sequence_id=seq.id,
                token_ids=tuple(seq.token_ids[start:end]),
                start=start,
                block_table=self._blocks.table(seq.id),
                sample=end == seq.num_tokens,
                params=seq.spec.params,
                prompt_ids=seq.spec.prompt_ids,
                output_ids=seq.output_ids,
                draft_ids=draft_ids,
            )
        )

    def _can_admit(self, seq: Sequence) -> bool:
        return self._num_places > 0 and self._blocks.can_allocate(self._demand(seq))

    def _demand(self, seq: Sequence) -> Demand:
        """To compute all of `seq`; at least its last token, whose logits are wanted, stays to be computed."""
        return Demand(
            hashes=self._hashes(seq, seq.num_tokens),
            num_blocks=self._blocks.blocks_for(seq.num_tokens),
            max_cached_tokens=seq.num_tokens - 1,
            keep_free=self._num_decodes,
        )

    def _admit(self, seq: Sequence) -> bool:
        """Moves the first waiting sequence to running, if there is room."""
        num_cached = self._blocks.allocate(seq.id, self._demand(seq)) if self._num_places > 0 else None
        if num_cached is None:
            return False
        if seq.num_preemptions == 0:
            seq.num_cached = min(num_cached, seq.num_prompt)
        seq.num_computed = num_cached
        seq.state = SequenceState.RUNNING
        self._waiting.remove(seq)
        self.running[seq.id] = seq
        return True

    def _make_room(self, seq: Sequence) -> bool:
        """Extends `seq`'s table to cover all its tokens, preempting as needed. False: it was preempted itself."""
        while not self._blocks.grow(seq.id, seq.num_tokens):
            victim = max(self.running.values(), key=_sort_key)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._blocks.free(seq.id)
        del self.running[seq.id]
        seq.state = SequenceState.WAITING
        seq.num_computed = 0
        seq.num_preemptions += 1
        self._wait(seq)

    def check_invariants(self) -> None:
        """AssertionError naming the sequence that is in two places, owns what it should not, or lacks blocks."""
        self._blocks.check_invariants()
        owners = [*self.running, *self.held, *self.reserved]
        assert len(owners) == len(set(owners)), f"a sequence is in two states: {sorted(owners)}"
        if self._speculator is not None:
            self._speculator.check_invariants((*owners, *(seq.id for seq in self._waiting)))
        leaked = self._blocks.owners ^ set(owners)
        assert not leaked, f"block tables and sequences differ: {sorted(leaked)}"
        assert len(self.running) + len(self.reserved) <= self._max_num_seqs, "more sequences than places"
        assert self._waiting == sorted(self._waiting, key=_sort_key), "waiting sequences are out of order"
        for seq in self._waiting:
            assert seq.id not in owners, f"waiting sequence {seq.id} owns blocks"
            assert seq.state is SequenceState.WAITING, f"waiting sequence {seq.id}: {seq.state}"
            assert seq.num_computed == 0, f"waiting sequence {seq.id} has computed {seq.num_computed} tokens"
        for seq in self.running.values():
            assert seq.state is SequenceState.RUNNING, f"running sequence {seq.id}: {seq.state}"
            assert 0 <= seq.num_computed < seq.num_tokens, f"sequence {seq.id}: {seq.num_computed} of {seq.num_tokens}"
            num_slots = len(self._blocks.table(seq.id)) * self._blocks.block_size
            assert seq.num_computed <= num_slots, f"sequence {seq.id}: computed {seq.num_computed} in {num_slots} slots"
