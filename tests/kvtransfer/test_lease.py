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
    table.grant("a", 10.0, 2.0)
    assert (len(table), table.remaining_s("a", 11.5)) == (1, 0.5)
    assert table.release("a")
    assert not table.release("a")
    assert table.expire(100.0) == []


def test_at_its_end_a_lease_cannot_be_renewed_but_is_still_reported() -> None:
    table = LeaseTable()
    table.grant("a", 0.0, 2.0)
    assert table.renew("a", 1.999, 2.0)
    assert not table.renew("a", 3.999, 2.0)
    assert table.remaining_s("a", 5.0) == 0.0
    assert table.expire(3.999) == ["a"]
    assert table.expire(3.999) == []


def test_a_late_release_by_a_reader_that_was_given_up_frees_nothing() -> None:
    table = LeaseTable()
    table.grant("a", 0.0, 1.0)
    assert table.expire(1.0) == ["a"]
    assert not table.release("a")
    assert not table.renew("a", 1.0, 5.0)


def test_a_renewal_never_shortens() -> None:
    table = LeaseTable()
    table.grant("a", 0.0, 10.0)
    assert table.renew("a", 1.0, 2.0)
    assert table.remaining_s("a", 1.0) == 9.0


def test_expired_leases_come_longest_overdue_first() -> None:
    table = LeaseTable()
    table.grant("late", 0.0, 3.0)
    table.grant("early", 0.0, 1.0)
    table.grant("alive", 0.0, 9.0)
    assert table.expire(5.0) == ["early", "late"]
    assert table.release("alive")


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_durations_must_be_positive_and_finite(duration_s: float) -> None:
    table = LeaseTable()
    with pytest.raises(ValueError, match=r"duration_s = .*: must be positive and finite"):
        table.grant("a", 0.0, duration_s)
    table.grant("a", 0.0, 1.0)
    with pytest.raises(ValueError, match="duration_s"):
        table.renew("a", 0.5, duration_s)
    assert table.remaining_s("a", 0.0) == 1.0


def test_a_lease_id_is_granted_once() -> None:
    table = LeaseTable()
    table.grant("a", 0.0, 1.0)
    with pytest.raises(ValueError, match="lease_id = 'a': already granted"):
        table.grant("a", 0.0, 1.0)
    assert table.release("a")


class LeaseMachine(RuleBasedStateMachine):
    """Every granted lease is handed back exactly once: by release or by expiry."""

    ids = Bundle("ids")
    durations = st.sampled_from([0.5, 1.0, 3.0])

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable()
        self.ends: dict[str, float] = {}
        self.now = 0.0

    @rule(target=ids, lease_id=st.sampled_from("abcdefgh"), duration_s=durations)
    def grant(self, lease_id: str, duration_s: float) -> str:
        if lease_id in self.ends:
            with pytest.raises(ValueError, match="already granted"):
                self.table.grant(lease_id, self.now, duration_s)
        else:
            self.table.grant(lease_id, self.now, duration_s)
            self.ends[lease_id] = self.now + duration_s
        return lease_id

    @rule(lease_id=ids, duration_s=durations)
    def renew(self, lease_id: str, duration_s: float) -> None:
        end = self.ends.get(lease_id, -1.0)
        alive = end > self.now
        assert self.table.renew(lease_id, self.now, duration_s) is alive
        if alive:
            self.ends[lease_id] = max(end, self.now + duration_s)

    @rule(lease_id=ids)
    def release(self, lease_id: str) -> None:
        assert self.table.release(lease_id) is (self.ends.pop(lease_id, None) is not None)

    @rule(seconds=st.sampled_from([0.25, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = sorted((end, lease_id) for lease_id, end in self.ends.items() if end <= self.now)
        assert self.table.expire(self.now) == [lease_id for _, lease_id in over]
        for _, lease_id in over:
            del self.ends[lease_id]

    @invariant()
    def holds(self) -> None:
        assert len(self.table) == len(self.ends)
        for lease_id, end in self.ends.items():
            assert self.table.remaining_s(lease_id, self.now) == max(0.0, end - self.now)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=40)
