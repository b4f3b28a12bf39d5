"""Own work in flight corrects a pod's record until a heartbeat shows it."""

from __future__ import annotations

import pytest

from router.placements import Placements
from router.snapshot import Correction

POD = ("d", "e1")
WORK = Correction(1, 100, 7)


def test_work_counts_until_a_heartbeat_shows_it() -> None:
    placements = Placements()
    placements.place(POD, "a", WORK, now=10.0)
    assert placements.correction(POD, since=9.0) == WORK
    assert placements.correction(POD, since=10.0) == WORK
    assert placements.correction(POD, since=10.1) == Correction(), "the record is newer: it counts itself"


def test_an_end_after_the_heartbeat_is_taken_off() -> None:
    placements = Placements()
    placements.place(POD, "a", WORK, now=1.0)
    assert placements.correction(POD, since=5.0) == Correction()
    placements.remove(POD, "a", now=6.0)
    assert placements.correction(POD, since=5.0) == Correction(-1, -100, -7)
    assert placements.correction(POD, since=7.0) == Correction()


def test_begun_and_ended_between_heartbeats_is_nothing() -> None:
    placements = Placements()
    placements.place(POD, "a", WORK, now=1.0)
    placements.remove(POD, "a", now=2.0)
    assert placements.correction(POD, since=0.0) == Correction()
    placements.check_invariants(set())


def test_leaks_and_double_counts_are_found() -> None:
    placements = Placements()
    placements.place(POD, "a", WORK, now=1.0)
    with pytest.raises(ValueError, match="already placed"):
        placements.place(POD, "a", WORK, now=1.0)
    placements.check_invariants({"a"})
    with pytest.raises(AssertionError, match=r"without a request: \['a'\]"):
        placements.check_invariants(set())
    placements.remove(POD, "a", now=2.0)
    with pytest.raises(KeyError):
        placements.remove(POD, "a", now=2.0)


def test_pods_that_are_gone_are_forgotten_once_nothing_is_on_them() -> None:
    placements = Placements()
    placements.place(POD, "a", WORK, now=1.0)
    placements.forget(live=set())
    assert placements.correction(POD, since=0.0) == Correction()
    placements.remove(POD, "a", now=2.0)
    placements.forget(live=set())
    placements.check_invariants(set())
