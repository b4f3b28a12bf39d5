"""A prefill pod and a decode pod with tiny caches under any order of calls, hand-offs between them included.

The oracle knows every right token, so a lost, swapped or stale block shows as a wrong answer; leases expire before,
during and after transfers, and what was read from a block under an unchanged generation is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import engine.fake
from engine.batch import Batch, HeldBlocks, Reservation
from engine.block_manager import BlockManager
from engine.fake import FakeProposer, FakeRunner
from engine.sequence import FinishReason, SampledToken, SequenceSpec
from tests.engine.machines import (
    allocate_and_name_at_once,
    explore,
    find_planted,
    take_without_growing_the_generation,
)
from tests.engine.pure import FakePod, Oracle, spec

BLOCK_SIZE = 2

PROMPTS = st.builds(lambda length, last: (*range(3, length + 2), last), st.integers(1, 9), st.sampled_from([90, 91]))
SPECS = st.builds(
    lambda prompt, max_tokens, temperature, priority, salt: spec(
        "", prompt, max_tokens=max_tokens, temperature=temperature, seed=5, priority=priority, cache_salt=salt
    ),
    PROMPTS,
    st.integers(1, 9),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 1),
    st.sampled_from(["", "", "", "salt"]),
)
CHOICES = st.integers(0, 10**6)


@dataclass
class Request:
    """One request on its way through both pods."""

    spec: SequenceSpec
    reservation: Reservation | None = None
    handoff: HeldBlocks | None = None
    first_token: int = -1


class TwoPods(RuleBasedStateMachine):
    """The decode pod drafts: right guesses, wrong ones, and none where blocks are short."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill = FakePod(7, BLOCK_SIZE, max_num_seqs=3, max_batched_tokens=5)
        self.decode = FakePod(12, BLOCK_SIZE, max_num_seqs=4, max_batched_tokens=9, proposer=FakeProposer())
        self.oracle = Oracle()
        self.requests: dict[str, Request] = {}
        self.num_names = 0

    def _new(self, each: SequenceSpec) -> SequenceSpec:
        self.num_names += 1
        named = replace(each, sequence_id=f"s{self.num_names}")
        self.oracle.expect(named)
        return named

    def _pick(self, choice: int, ready: list[Request]) -> Request | None:
        return ready[choice % len(ready)] if ready else None

    @rule(each=SPECS)
    def add_decode_only(self, each: SequenceSpec) -> None:
        self.decode.core.add(self._new(each))

    @rule(each=SPECS, credit_first=st.booleans())
    def add_disaggregated(self, each: SequenceSpec, credit_first: bool) -> None:
        request = Request(self._new(each))
        if credit_first:
            request.reservation = self.decode.core.reserve(request.spec)
        self.prefill.core.add(request.spec, hold=True)
        self.requests[request.spec.sequence_id] = request

    @rule(choice=CHOICES)
    def reserve(self, choice: int) -> None:
        request = self._pick(choice, [r for r in self.requests.values() if r.reservation is None])
        if request is not None:
            request.reservation = self.decode.core.reserve(request.spec)

    @rule(count=st.integers(1, 4))
    def run_prefill(self, count: int) -> None:
        for _ in range(count):
            self._step_prefill()

    def _step_prefill(self) -> None:
        events = self.prefill.step()
        self.oracle.see(events)
        for event in events:
            request = self.requests[event.sequence_id]
            if event.finish_reason is None:
                request.handoff = self.prefill.core.held(event.sequence_id)
                request.first_token = event.token.token_id
            else:
                self._forget(request)

    @rule(count=st.integers(1, 8))
    def run_decode(self, count: int) -> None:
        for _ in range(count):
            self.oracle.see(self.decode.step())

    @rule(choice=CHOICES)
    def lease_expires(self, choice: int) -> None:
        request = self._pick(choice, [r for r in self.requests.values() if r.handoff is not None])
        if request is not None:
            self.prefill.core.release_held(request.spec.sequence_id)

    @rule(choice=CHOICES, is_slow=st.booleans())
    def hand_off(self, choice: int, is_slow: bool) -> None:
        request = self._pick(choice, [r for r in self.requests.values() if r.handoff and r.reservation])
        if request is None:
            return
        assert request.handoff is not None
        assert request.reservation is not None
        arrived = self._pull(request.handoff, request.reservation, is_slow)
        started = replace(request.spec, output_ids=(request.first_token,))
        self.prefill.core.release_held(request.spec.sequence_id)
        del self.requests[request.spec.sequence_id]
        if arrived:
            self.decode.core.activate(started)
        else:
            self.decode.core.abort(request.spec.sequence_id)
            self.decode.core.add(started)

    def _pull(self, handoff: HeldBlocks, reservation: Reservation, is_slow: bool) -> bool:
        """Reads the blocks that are not here, then their generations; slow: the prefill pod steps in between."""
        first = reservation.num_cached // BLOCK_SIZE
        for remote, local in list(zip(handoff.block_ids, reservation.block_ids, strict=False))[first:]:
            if is_slow:
                self._step_prefill()
            self.decode.kv_blocks[local] = self.prefill.kv_blocks[remote]
        seen = [int(self.prefill.generations[block]) for block in handoff.block_ids[first:]]
        return seen == list(handoff.generations[first:])

    @rule(choice=CHOICES)
    def cancel(self, choice: int) -> None:
        request = self._pick(choice, list(self.requests.values()))
        if request is not None:
            self._forget(request)

    @rule(choice=CHOICES)
    def abort_on_decode_pod(self, choice: int) -> None:
        if self.num_names and (name := f"s{choice % self.num_names + 1}") not in self.requests:
            self.decode.core.abort(name)

    def _forget(self, request: Request) -> None:
        name = request.spec.sequence_id
        self.prefill.core.abort(name)
        self.decode.core.abort(name)
        del self.requests[name]

    @invariant()
    def nothing_leaks(self) -> None:
        self.prefill.core.check_invariants()
        self.decode.core.check_invariants()

    def teardown(self) -> None:
        """What is with the decode pod ends with the right answer; the rest is cancelled; nothing is left."""
        for request in list(self.requests.values()):
            self._forget(request)
        expected = {seq.id for seq in self.decode.core._scheduler.waiting} | set(self.decode.core._scheduler.running)
        self.oracle.see(self.decode.run())
        assert expected <= self.oracle.finished.keys()
        assert all(reason is not FinishReason.FAILED for reason in self.oracle.finished.values())
        self.prefill.assert_idle()
        self.decode.assert_idle()


def test_any_order_of_calls() -> None:
    explore(TwoPods, 100)


execute, table = FakeRunner.execute, BlockManager.table


def accept_every_draft(draft_ids: tuple[int, ...], drawn: list[SampledToken]) -> tuple[SampledToken, ...]:
    return (*map(SampledToken, draft_ids), drawn[-1])


def execute_without_copies(self: FakeRunner, batch: Batch) -> list[tuple[SampledToken, ...]]:
    return execute(self, replace(batch, copies=()))


def table_with_two_blocks_swapped(self: BlockManager, sequence_id: str) -> tuple[int, ...]:
    """A table while it has three blocks reads last to first."""
    blocks = table(self, sequence_id)
    return blocks[::-1] if len(blocks) == 3 else blocks


@pytest.mark.parametrize(
    ("owner", "method", "planted"),
    [
        (engine.fake, "verified", accept_every_draft),
        (BlockManager, "allocate", allocate_and_name_at_once),
        (BlockManager, "table", table_with_two_blocks_swapped),
        (FakeRunner, "execute", execute_without_copies),
    ],
)
def test_a_planted_bug_gives_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, owner: object, method: str, planted: object
) -> None:
    monkeypatch.setattr(owner, method, planted)
    with pytest.raises(AssertionError, match="is wrong"):
        find_planted(TwoPods)


def hand_off_after_the_lease_expired() -> None:
    """The prefill pod gives the blocks to another prompt, then the decode pod reads them."""
    machine = TwoPods()
    machine.add_disaggregated(spec("", (3, 4, 5, 90), max_tokens=5), credit_first=True)
    machine.run_prefill(1)
    machine.lease_expires(0)
    machine.add_disaggregated(spec("", range(20, 34)), credit_first=False)
    machine.run_prefill(4)
    machine.hand_off(0, is_slow=False)
    machine.teardown()


def test_a_stale_block_is_recognised_by_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_off_after_the_lease_expired()
    monkeypatch.setattr(BlockManager, "_take", take_without_growing_the_generation)
    with pytest.raises(AssertionError, match="token 1 is wrong"):
        hand_off_after_the_lease_expired()
