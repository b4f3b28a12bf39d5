"""LeaseTable: a few fixed cases, then a state machine that compares it with a plain dictionary after each step."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.lease import LeaseTable


def test_a_lease_ends_exactly_once() -> None:
    table = LeaseTable()
    table.grant("a", "seq-1", 10.0, 2.0)
    assert (len(table), table.remaining_s("a", 11.5)) == (1, 0.5)
    assert table.release("a") == "seq-1"
    assert table.release("a") is None
    assert table.expire(100.0) == []


def test_at_its_end_a_lease_cannot_be_renewed_but_is_still_reported() -> None:
    table = LeaseTable()
    table.grant("a", "seq-1", 0.0, 2.0)
    assert table.renew("a", 1.999, 2.0)
    assert not table.renew("a", 3.999, 2.0)
    assert table.remaining_s("a", 5.0) == 0.0
    assert table.expire(3.999) == [("a", "seq-1")]
    assert table.expire(3.999) == []


def test_a_late_release_by_a_reader_that_was_given_up_frees_nothing() -> None:
    table = LeaseTable()
    table.grant("a", "seq-1", 0.0, 1.0)
    assert table.expire(1.0) == [("a", "seq-1")]
    assert table.release("a") is None
    assert not table.renew("a", 1.0, 5.0)


def test_a_renewal_never_shortens() -> None:
    table = LeaseTable()
    table.grant("a", "seq-1", 0.0, 10.0)
    assert table.renew("a", 1.0, 2.0)
    assert table.remaining_s("a", 1.0) == 9.0


def test_expired_leases_come_longest_overdue_first() -> None:
    table = LeaseTable()
    table.grant("late", "x", 0.0, 3.0)
    table.grant("early", "y", 0.0, 1.0)
    table.grant("alive", "y", 0.0, 9.0)
    assert table.expire(5.0) == [("early", "y"), ("late", "x")]
    assert table.release("alive") == "y"


def test_an_owner_that_is_gone_takes_its_leases_along() -> None:
    table = LeaseTable()
    table.grant("a", "seq-1", 0.0, 1.0)
    table.grant("b", "seq-1", 0.0, 1.0)
    table.grant("c", "seq-2", 0.0, 1.0)
    assert table.owner_released("seq-1") == ["a", "b"]
    assert table.owner_released("seq-1") == []
    assert table.expire(2.0) == [("c", "seq-2")]


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_durations_must_be_positive_and_finite(duration_s: float) -> None:
    table = LeaseTable()
    with pytest.raises(ValueError, match=r"duration_s = .*: must be positive and finite"):
        table.grant("a", "seq-1", 0.0, duration_s)
    table.grant("a", "seq-1", 0.0, 1.0)
    with pytest.raises(ValueError, match="duration_s"):
        table.renew("a", 0.5, duration_s)
    assert table.remaining_s("a", 0.0) == 1.0


def test_a_lease_id_is_granted_once() -> None:
    table = LeaseTable()
    table.grant("a", "seq-1", 0.0, 1.0)
    with pytest.raises(ValueError, match="already granted to 'seq-1'"):
        table.grant("a", "seq-2", 0.0, 1.0)
    assert table.release("a") == "seq-1"


class LeaseMachine(RuleBasedStateMachine):
    """Every granted lease is handed back exactly once: by release, by expiry, or with its owner."""

    ids = Bundle("ids")
    owners = st.sampled_from(["x", "y", "z"])
    durations = st.sampled_from([0.5, 1.0, 3.0])

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable()
        self.model: dict[str, tuple[str, float]] = {}
        self.now = 0.0

    @rule(target=ids, lease_id=st.sampled_from("abcdefgh"), owner=owners, duration_s=durations)
    def grant(self, lease_id: str, owner: str, duration_s: float) -> str:
        if lease_id in self.model:
            with pytest.raises(ValueError, match="already granted"):
                self.table.grant(lease_id, owner, self.now, duration_s)
        else:
            self.table.grant(lease_id, owner, self.now, duration_s)
            self.model[lease_id] = (owner, self.now + duration_s)
        return lease_id

    @rule(lease_id=ids, duration_s=durations)
    def renew(self, lease_id: str, duration_s: float) -> None:
        owner, expires_at = self.model.get(lease_id, ("", -1.0))
        alive = expires_at > self.now
        assert self.table.renew(lease_id, self.now, duration_s) is alive
        if alive:
            self.model[lease_id] = (owner, max(expires_at, self.now + duration_s))

    @rule(lease_id=ids)
    def release(self, lease_id: str) -> None:
        owner, _ = self.model.pop(lease_id, (None, 0.0))
        assert self.table.release(lease_id) == owner

    @rule(owner=owners)
    def release_owner(self, owner: str) -> None:
        gone = sorted(lease_id for lease_id, (o, _) in self.model.items() if o == owner)
        assert self.table.owner_released(owner) == gone
        for lease_id in gone:
            del self.model[lease_id]

    @rule(seconds=st.sampled_from([0.25, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = {(lease_id, owner) for lease_id, (owner, at) in self.model.items() if at <= self.now}
        got = self.table.expire(self.now)
        assert len(got) == len(over)
        assert set(got) == over
        for lease_id, _ in over:
            del self.model[lease_id]

    @invariant()
    def holds(self) -> None:
        self.table.check_invariants()
        assert len(self.table) == len(self.model)
        for lease_id, (_, at) in self.model.items():
            assert self.table.remaining_s(lease_id, self.now) == max(0.0, at - self.now)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40)
