"""The scheduler under any order of calls: budgets, order, contiguous progress, untouched reservations, no livelock."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.batch import Batch, ScheduledSequence
from engine.block_manager import BlockManager
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceSpec
from tests.engine.machines import explore
from tests.engine.pure import spec

BLOCK_SIZE = 2
NUM_BLOCKS = 9
MAX_NUM_SEQS = 3
BUDGET = 5
MAX_TOKENS = 17  # of a whole sequence: fits alone

PROMPTS = st.builds(lambda length, last: (*range(length - 1), last), st.integers(1, 9), st.sampled_from([1, 50]))
CHOICES = st.integers(0, 10**6)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(self.blocks, max_num_seqs=MAX_NUM_SEQS, max_batched_tokens=BUDGET)
        self.num_names = 0
        self.reservations: dict[str, tuple[SequenceSpec, tuple[int, ...]]] = {}

    def name(self) -> str:
        self.num_names += 1
        return f"s{self.num_names}"

    @rule(prompt=PROMPTS, priority=st.integers(0, 2), hold=st.booleans())
    def add(self, prompt: tuple[int, ...], priority: int, hold: bool) -> None:
        self.scheduler.add(spec(self.name(), prompt, priority=priority), hold=hold)

    @rule(prompt=PROMPTS, priority=st.integers(0, 2))
    def reserve(self, prompt: tuple[int, ...], priority: int) -> None:
        each = spec(self.name(), prompt, priority=priority)
        reservation = self.scheduler.reserve(each, self.blocks.blocks_for(len(prompt)) + 1)
        if reservation is None:
            return
        assert self.blocks.num_free >= sum(not seq.hold for seq in self.scheduler.running.values())
        self.reservations[each.sequence_id] = each, reservation.block_ids

    @rule(choice=CHOICES)
    def activate(self, choice: int) -> None:
        if self.reservations:
            each, _ = self.reservations.pop(sorted(self.reservations)[choice % len(self.reservations)])
            self.scheduler.activate(spec(each.sequence_id, each.prompt_ids, output=[9], priority=each.priority))

    @rule(choice=CHOICES)
    def remove(self, choice: int) -> None:
        scheduler = self.scheduler
        names = [seq.id for seq in scheduler.waiting] + [*scheduler.running, *scheduler.held, *scheduler.reserved]
        if names:
            name = names[choice % len(names)]
            self.reservations.pop(name, None)
            assert scheduler.remove(name)

    @rule()
    def step(self) -> None:
        had_work = self.scheduler.has_work
        num_preemptions = self.num_preemptions()
        decoding = {name for name, seq in self.scheduler.running.items() if seq.is_decoding}
        batch = self.scheduler.schedule()
        assert not (batch.sequences and not had_work)
        assert not had_work or batch.sequences or self.num_preemptions() > num_preemptions
        assert batch.num_tokens <= BUDGET
        self.check_order(batch, decoding)
        for scheduled in batch.sequences:
            self.compute(self.scheduler.running[scheduled.sequence_id], scheduled.start, scheduled.end)

    def num_preemptions(self) -> int:
        everyone = (*self.scheduler.waiting, *self.scheduler.running.values())
        return sum(seq.num_preemptions for seq in everyone)

    def check_order(self, batch: Batch, decoding: set[str]) -> None:
        """Every decode that was not preempted is in, first and in order; prefills follow."""
        running = self.scheduler.running
        names = [s.sequence_id for s in batch.sequences]
        assert len(names) == len(set(names))
        decodes = [name for name in names if name in decoding]
        assert names[: len(decodes)] == decodes
        assert decodes == sorted(decodes, key=lambda name: running[name].sort_key)
        self.check_prefills(batch.sequences[len(decodes) :])
        passed_over = [name for name in running if name in decoding and name not in names]
        assert not passed_over, f"decodes {passed_over} got nothing"

    def check_prefills(self, prefills: tuple[ScheduledSequence, ...]) -> None:
        """In order, but that before the one that is not finished others of its priority may go, in half its budget."""
        keys = [self.scheduler.running[s.sequence_id].sort_key for s in prefills]
        finished = [key for key, s in zip(keys, prefills, strict=True) if s.sample]
        assert finished == sorted(finished)
        if len(finished) == len(prefills):
            return
        *others, unfinished = keys
        assert others == finished
        passing = [s for key, s in zip(keys, prefills, strict=True) if key > unfinished]
        assert {key[0] for key in finished if key > unfinished} <= {unfinished[0]}
        assert sum(len(s.token_ids) for s in passing) <= len(prefills[-1].token_ids)

    def compute(self, seq: Sequence, start: int, end: int) -> None:
        assert start == seq.num_computed
        assert len(set(self.blocks.table(seq.id))) * BLOCK_SIZE >= end
        self.scheduler.computed(seq, end)
        if end < seq.num_tokens:
            return
        seq.token_ids.append(7)
        if seq.num_tokens > MAX_TOKENS:
            self.scheduler.remove(seq.id)
        elif seq.hold:
            self.scheduler.hold(seq)

    @invariant()
    def everything_is_counted_once(self) -> None:
        self.scheduler.check_invariants()

    @invariant()
    def reservations_are_never_touched(self) -> None:
        for name, (_, block_ids) in self.reservations.items():
            assert self.blocks.table(name) == block_ids

    def teardown(self) -> None:
        """Without reservations and holds everything ends, in bounded time, and nothing is left."""
        for name in [*self.scheduler.held, *self.scheduler.reserved]:
            self.scheduler.remove(name)
        self.reservations.clear()
        for _ in range(100 * (self.num_names + 1)):
            if not self.scheduler.waiting and not self.scheduler.running:
                break
            self.step()
            for name in list(self.scheduler.held):
                self.scheduler.remove(name)
        self.scheduler.check_invariants()
        assert not self.scheduler.waiting, "livelock"
        assert not self.scheduler.running, "livelock"
        assert self.blocks.num_free == NUM_BLOCKS


def test_any_order_of_calls() -> None:
    explore(SchedulerMachine, 80)
