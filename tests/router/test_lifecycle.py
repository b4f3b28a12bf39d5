"""The table of a request's life: complete, free of leaks on every path, and drawn as it is in the manual."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.lifecycle import HELD, TABLE, TOLD, Event, InvalidTransition, Resource, State, Transition, advance

MANUAL = Path(__file__).parents[2] / "docs" / "router.md"


@pytest.mark.parametrize(("state", "event"), TABLE)
def test_every_row_accounts_for_everything(state: State, event: Event) -> None:
    row = TABLE[state, event]
    assert HELD[state] | row.acquires == HELD[row.state] | row.settled | row.released
    parts = (row.settled, row.released, HELD[row.state])
    assert sum(map(len, parts)) == len(frozenset[Resource]().union(*parts)), "each resource has one fate"


@pytest.mark.parametrize("state", State)
def test_every_state_can_be_left_and_terminal_ones_cannot(state: State) -> None:
    events = {event for (s, event) in TABLE if s is state}
    if state.terminal:
        assert events == set()
        assert HELD[state] == frozenset()
    else:
        assert {Event.GAVE_UP, Event.CANCELLED} <= events
        assert (Event.ATTEMPT_FAILED in events) == (state is not State.QUEUED)


def test_every_state_is_reachable() -> None:
    reached, frontier = {State.QUEUED}, [State.QUEUED]
    while frontier:
        state = frontier.pop()
        for (source, _), row in TABLE.items():
            if source is state and row.state not in reached:
                reached.add(row.state)
                frontier.append(row.state)
    assert reached == set(State)


def test_an_impossible_event_is_named() -> None:
    with pytest.raises(InvalidTransition, match="tokens cannot happen to a request that is queued"):
        advance(State.QUEUED, Event.TOKENS)


def test_every_resource_says_who_is_told() -> None:
    assert set(TOLD) == set(Resource)


@given(st.data())
def test_whatever_happens_nothing_is_held_at_the_end(data: st.DataObject) -> None:
    """Any path of events, ended by a cancellation: what was acquired was settled or released exactly once."""
    state, held = State.QUEUED, set[Resource]()
    for _ in range(data.draw(st.integers(0, 30))):
        events = sorted((event for (s, event) in TABLE if s is state), key=lambda e: e.value)
        if not events:
            break
        row = advance(state, data.draw(st.sampled_from(events)))
        assert not held & row.acquires, "acquired twice"
        held |= row.acquires
        assert row.settled | row.released <= held, "freed what is not held"
        held -= row.settled | row.released
        state = row.state
    if not state.terminal:
        held -= advance(state, Event.CANCELLED).released
    assert not held


class PodsModel(RuleBasedStateMachine):
    """Plays the pods: what they still hold for a request after it has ended must be nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State.QUEUED
        self.decode_holds = self.prefill_holds = self.router_holds = False

    def move(self, event: Event) -> None:
        row = advance(self.state, event)
        self.state = row.state
        self.apply(row)

    def apply(self, row: Transition) -> None:
        if row.acquires & {Resource.CREDIT, Resource.SEQUENCE}:
            self.decode_holds = True
        if row.acquires & {Resource.PREFILL, Resource.LEASE}:
            self.prefill_holds = True
        self.router_holds = bool(HELD[row.state] & {Resource.STREAM, Resource.PREFILL_SLOT, Resource.DECODE_SLOT})
        if row.released & {Resource.CREDIT, Resource.SEQUENCE}:
            self.decode_holds = False
        if row.released & {Resource.PREFILL, Resource.LEASE}:
            self.prefill_holds = False

    @precondition(lambda self: not self.state.terminal)
    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        events = sorted((event for (s, event) in TABLE if s is self.state), key=lambda e: e.value)
        event = data.draw(st.sampled_from(events))
        if event is Event.ANSWERED:  # the pod that sent the last token has freed everything by itself
            self.decode_holds = self.decode_holds and self.state is State.PREFILLING
            self.prefill_holds = False
        if event is Event.TOKENS:
            self.prefill_holds = False  # the decode pod has released the lease
        if event is Event.STOPPED and self.state is State.TRANSFERRING:
            self.prefill_holds = False
        self.move(event)

    @precondition(lambda self: self.state.terminal)
    @rule()
    def another_request_arrives(self) -> None:
        self.state = State.QUEUED

    @invariant()
    def nothing_is_left_when_it_has_ended(self) -> None:
        if self.state.terminal or self.state is State.QUEUED:
            assert not self.router_holds
            assert not self.decode_holds, f"{self.state.value}: the decode pod was not told"
            assert not self.prefill_holds, f"{self.state.value}: the prefill pod was not told"


PodsModel.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestPodsModel = PodsModel.TestCase


def test_the_manual_shows_the_table_as_it_is() -> None:
    text = MANUAL.read_text()
    for (state, event), row in TABLE.items():
        released = ", ".join(sorted(r.value for r in row.released)) or "-"
        settled = ", ".join(sorted(r.value for r in row.settled)) or "-"
        assert f"| {state.value} | {event.value} | {row.state.value} | {settled} | {released} |" in text
