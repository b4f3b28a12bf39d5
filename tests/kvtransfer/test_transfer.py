"""The pull as a state machine, and the plan of what it reads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.layout import KVLayout
from kvtransfer.transfer import FINAL, QUARANTINED, TRANSITIONS, Event, GroupRead, State, Transfer, plan_pull
from proto import kv_pb2
from proto.errors import InternalError, LayoutMismatch
from tests.kvtransfer.pods import LAYOUT, make_handoff

# --- transitions ---


def test_every_state_is_reached_and_every_open_one_can_fail() -> None:
    assert set(TRANSITIONS.values()) | {State.CONNECTING} == set(State)
    for state in set(State) - FINAL:
        assert (state, Event.FAILED) in TRANSITIONS
    assert not any(state in FINAL for state, _ in TRANSITIONS)


@pytest.mark.parametrize(("state", "event"), set(itertools.product(State, Event)) - set(TRANSITIONS), ids=str)
def test_events_out_of_place_are_bugs(state: State, event: Event) -> None:
    with pytest.raises(RuntimeError, match=f"{event.name} has no place in {state.name}"):
        Transfer("s", frozenset({1}), state).on(event)


class TransferMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, the blocks are quarantined while a read is in flight."""

    @initialize()
    def start(self) -> None:
        self.transfer = Transfer("s", frozenset({1, 2}))

    def open(self, *states: State) -> bool:
        return self.transfer.state in states

    @precondition(lambda self: self.open(State.CONNECTING, State.WAITING))
    @rule()
    def advance(self) -> None:
        self.transfer.on(Event.CONNECTED if self.open(State.CONNECTING) else Event.ADMITTED)

    @precondition(lambda self: self.open(State.READING, State.VERIFYING))
    @rule()
    def post(self) -> None:
        self.transfer.read_posted()

    @precondition(lambda self: self.transfer.num_in_flight > 0)
    @rule()
    def settle(self) -> None:
        self.transfer.read_settled()

    @precondition(lambda self: self.open(State.READING, State.VERIFYING))
    @rule()
    def next_stage(self) -> None:
        event = Event.ALL_LANDED if self.open(State.READING) else Event.VERIFIED
        if self.transfer.num_in_flight:
            with pytest.raises(RuntimeError, match="reads in flight"):
                self.transfer.on(event)
        else:
            self.transfer.on(event)

    @rule()
    def fail(self) -> None:
        self.transfer.fail()

    @invariant()
    def holds(self) -> None:
        self.transfer.check_invariants()
        if self.transfer.num_in_flight:
            assert self.transfer.quarantined == {1, 2}
        assert (self.transfer.state in QUARANTINED) == bool(self.transfer.quarantined)


TestTransferMachine = TransferMachine.TestCase


def test_a_read_cannot_settle_twice_nor_be_posted_too_early() -> None:
    transfer = Transfer("s", frozenset({1}))
    with pytest.raises(RuntimeError, match="posted in CONNECTING"):
        transfer.read_posted()
    with pytest.raises(RuntimeError, match="not posted"):
        transfer.read_settled()


# --- plans ---


@given(num_tokens=st.integers(1, 40), num_cached=st.integers(0, 50))
def test_only_the_blocks_past_the_cached_tokens_are_read(num_tokens: int, num_cached: int) -> None:
    """Nothing when all is here, else from the first block that is not whole, each into its place."""
    blocks = list(range(100, 100 + -(-num_tokens // LAYOUT.block_size)))
    local = list(range(len(blocks) + 1))
    plan = plan_pull(LAYOUT, make_handoff(blocks, num_tokens), local, num_cached)
    expected = (
        [] if num_cached >= num_tokens else list(zip(blocks, local, strict=False))[num_cached // LAYOUT.block_size :]
    )
    assert [pair for g in plan.groups for pair in zip(g.source_block_ids, g.local_block_ids, strict=True)] == expected
    assert plan.num_bytes == len(expected) * LAYOUT.block_bytes
    assert plan.expected == {block: block + 1000 for block, _ in expected}


def test_groups_of_layers_are_read_with_one_transfer_each() -> None:
    handoff = make_handoff([4, 5], 7)
    del handoff.groups[:]
    for layer, blocks in ((0, (4, 5)), (1, (6, 7))):
        handoff.groups.add(
            first_layer=layer, num_layers=1, blocks=[kv_pb2.BlockRef(block_id=b, generation=b) for b in blocks]
        )
    plan = plan_pull(LAYOUT, handoff, [0, 1, 2], 0)
    half = LAYOUT.block_bytes // 2
    assert plan.groups == (GroupRead((4, 5), (0, 1), 0, half), GroupRead((6, 7), (0, 1), half, half))
    assert plan.expected == {4: 4, 5: 5, 6: 6, 7: 7}
    assert plan.local_block_ids == {0, 1}


@pytest.mark.parametrize(
    ("local", "cached", "num_tokens", "why"),
    [
        ([0], 0, 7, "must be 2 different blocks"),
        ([3, 3], 0, 7, "must be 2 different blocks"),
        ([0, 1], -1, 7, "num_cached_tokens = -1"),
        ([0, 1], 0, 0, "num_tokens = 0"),
        ([0, 1, 2], 0, 9, "2 blocks for 9 tokens: must be 3"),
    ],
)
def test_what_does_not_add_up(local: list[int], cached: int, num_tokens: int, why: str) -> None:
    with pytest.raises(InternalError, match=why):
        plan_pull(LAYOUT, make_handoff([4, 5], num_tokens), local, cached)


@pytest.mark.parametrize(
    "groups", [[], [(0, 1)], [(1, 1)], [(0, 3)], [(0, 1), (0, 1)], [(0, 2), (2, 1)], [(0, 0), (0, 2)]]
)
def test_groups_must_cover_the_layers(groups: list[tuple[int, int]]) -> None:
    handoff = make_handoff([4, 5], 7)
    blocks = list(handoff.groups[0].blocks)
    del handoff.groups[:]
    for first_layer, num_layers in groups:
        handoff.groups.add(first_layer=first_layer, num_layers=num_layers, blocks=blocks)
    with pytest.raises(LayoutMismatch):
        plan_pull(LAYOUT, handoff, [0, 1], 0)


def test_a_block_has_one_generation() -> None:
    handoff = make_handoff([4, 4], 7)
    handoff.groups[0].blocks[1].generation += 1
    with pytest.raises(InternalError, match="two generations"):
        plan_pull(LAYOUT, handoff, [0, 1], 0)


def test_layout_of_the_tests_has_two_layers() -> None:
    assert KVLayout.from_proto(LAYOUT.to_proto()) == LAYOUT
    assert (LAYOUT.num_layers, LAYOUT.block_size) == (2, 4)
