"""A gap between two looks at the clock."""

from __future__ import annotations

from router.standstill import AFTERMATH_S, STANDSTILL_S, Standstill


def test_a_gap_is_noticed_by_whoever_asks_first_and_remembered_for_a_while() -> None:
    now = 10.0
    standstill = Standstill(lambda: now)
    for _ in range(10):
        now += STANDSTILL_S
        assert not standstill.is_recent()
    now += STANDSTILL_S + 0.1
    assert standstill.is_recent()
    now += AFTERMATH_S - 0.1
    assert standstill.is_recent()
    now += 0.1
    assert not standstill.is_recent()
