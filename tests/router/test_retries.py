"""What an error means, whom it blames, and when to stop trying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proto.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    NotFound,
    Overloaded,
    PdserveError,
    PeerLost,
    PodUnavailable,
)
from router.failures import CutOff, Leg, PodLost, Verdict, judge
from router.lifecycle import State
from router.policy import RoutingDecision
from router.retries import MAX_BUGS, MAX_FAILURES, MAX_REFUSALS, Retries
from tests.router.test_policy import decode, prefill

DECISION = RoutingDecision(
    prefill_pod=prefill("p"), decode_pod=decode("d"), reason="", predicted_prefill_s=0, predicted_cached_tokens=0
)
P, D = ("p", "e1"), ("d", "e1")


@pytest.mark.parametrize(
    ("state", "error", "verdict"),
    [
        (State.RESERVING, PodUnavailable("x"), Verdict(True, avoid=Leg.DECODE, suspect=False)),
        (State.PREFILLING, PodUnavailable("x"), Verdict(True, avoid=Leg.PREFILL, suspect=False)),
        (State.HANDING_OFF, PodLost("x"), Verdict(True, avoid=Leg.DECODE)),
        (State.TRANSFERRING, PodLost("x"), Verdict(True, avoid=Leg.DECODE)),
        (State.RESERVING, CutOff("x"), Verdict(True)),
        (State.DECODING, CutOff("x"), Verdict(True)),
        (State.DECODING, InternalError("x"), Verdict(True, avoid=Leg.DECODE)),
        (State.TRANSFERRING, PeerLost("x"), Verdict(True, avoid=Leg.PREFILL)),
        (State.TRANSFERRING, LayoutMismatch("x"), Verdict(True, avoid=Leg.PREFILL)),
        (State.TRANSFERRING, LeaseExpired("x"), Verdict(True)),
        (State.HANDING_OFF, LeaseExpired("x"), Verdict(True)),
        (State.HANDING_OFF, NotFound("x"), Verdict(True)),
        (State.DECODING, Cancelled("x"), Verdict(True)),
        (State.RESERVING, Overloaded("x"), Verdict(True, busy=Leg.DECODE, suspect=False)),
        (State.PREFILLING, Overloaded("x"), Verdict(True, busy=Leg.PREFILL, suspect=False)),
        (State.PREFILLING, InvalidRequest("x"), Verdict(False)),
        (State.QUEUED, Overloaded("x"), Verdict(False)),
    ],
)
def test_verdicts(state: State, error: PdserveError, verdict: Verdict) -> None:
    assert judge(state, error) == verdict


def test_failures_that_the_request_may_have_caused_are_bounded() -> None:
    retries = Retries(5.0, 20.0, None)
    results = [retries.should_retry(State.DECODING, PodLost("x"), DECISION, 0.0) for _ in range(MAX_FAILURES)]
    assert results == [True] * (MAX_FAILURES - 1) + [False]
    assert retries.avoid == {D}


def test_a_pod_that_cut_the_router_off_is_asked_again_at_once_and_not_for_ever() -> None:
    """Even if the wait for room was over before the router stood still."""
    retries = Retries(5.0, 20.0, None)
    assert retries.wait_s(0.0) == 5.0
    results = [retries.should_retry(State.RESERVING, CutOff("x"), DECISION, 12.0) for _ in range(MAX_FAILURES)]
    assert results == [True] * (MAX_FAILURES - 1) + [False]
    assert (retries.avoid, retries.busy(12.0), retries.wait_s(12.0)) == (frozenset(), frozenset(), 20.0)


def test_pods_that_were_gone_or_said_no_are_bounded_by_time() -> None:
    retries = Retries(5.0, 20.0, None)
    assert retries.wait_s(10.0) == 5.0
    for _ in range(3 * MAX_REFUSALS):
        assert retries.should_retry(State.PREFILLING, PodUnavailable("x"), DECISION, 14.9)
    assert not retries.should_retry(State.PREFILLING, PodUnavailable("x"), DECISION, 15.0)


def test_a_pod_that_says_no_late_is_not_the_end() -> None:
    """The wait for room is over, by computing on a pod that then was told to stop."""
    retries = Retries(5.0, 20.0, None)
    assert retries.wait_s(10.0) == 5.0
    results = [retries.should_retry(State.DECODING, PodUnavailable("x"), DECISION, 99.0) for _ in range(MAX_REFUSALS)]
    assert results == [True] * (MAX_REFUSALS - 1) + [False]


def test_refusals_do_not_use_up_the_attempts_of_failures() -> None:
    retries = Retries(5.0, 20.0, None)
    for _ in range(3 * MAX_REFUSALS):
        retries.should_retry(State.RESERVING, PodUnavailable("x"), DECISION, 0.0)
    results = [retries.should_retry(State.DECODING, PodLost("x"), DECISION, 0.0) for _ in range(MAX_FAILURES)]
    assert results == [True] * (MAX_FAILURES - 1) + [False]


def test_a_request_that_breaks_engines_does_not_visit_them_all() -> None:
    retries = Retries(5.0, 20.0, None)
    results = [retries.should_retry(State.PREFILLING, InternalError("x"), DECISION, 0.0) for _ in range(MAX_BUGS)]
    assert results == [True] * (MAX_BUGS - 1) + [False]
    assert retries.avoid == {P}


def test_a_full_pod_is_left_alone_for_a_moment_and_not_counted() -> None:
    retries = Retries(5.0, 20.0, None)
    for _ in range(3 * MAX_FAILURES):
        assert retries.should_retry(State.RESERVING, Overloaded("x"), DECISION, 10.0)
    assert retries.busy(10.1) == {D}
    assert retries.busy(10.3) == frozenset()
    assert retries.avoid == frozenset()


def test_a_pod_that_failed_is_left_alone_for_longer_each_time() -> None:
    """Refusals that take no time must leave time for another pod to be seen."""
    retries, now = Retries(5.0, 20.0, None), 10.0
    for pause_s in (0.2, 0.4, 0.8, 1.6, 3.2, 3.2):
        assert retries.should_retry(State.RESERVING, PodUnavailable("draining"), DECISION, now)
        assert retries.pause_s == pytest.approx(pause_s)
        assert retries.busy(now + pause_s - 0.01) == {D}
        now += pause_s + 0.01
        assert retries.busy(now) == frozenset()


def test_nobody_is_left_alone_for_what_was_nobody_s_fault() -> None:
    retries = Retries(5.0, 20.0, None)
    retries.should_retry(State.RESERVING, Overloaded("x"), DECISION, 0.0)
    retries.should_retry(State.TRANSFERRING, LeaseExpired("x"), DECISION, 1.0)
    assert (retries.pause_s, retries.busy(1.0)) == (0.0, frozenset())


def test_decode_only_has_no_prefill_pod_to_blame() -> None:
    retries = Retries(5.0, 20.0, None)
    alone = replace(DECISION, prefill_pod=None)
    assert retries.should_retry(State.DECODING, PeerLost("x"), alone, 0.0)
    assert retries.avoid == frozenset()


def test_waiting_is_bounded_in_all_until_something_was_computed() -> None:
    retries = Retries(5.0, 20.0, None)
    assert retries.wait_s(100.0) == 5.0
    assert retries.wait_s(103.0) == 2.0
    assert retries.wait_s(110.0) == 0.0
    retries.progressed()
    assert retries.wait_s(110.0) == 20.0


def test_a_request_whose_pod_was_lost_waits_until_one_may_have_started_again() -> None:
    retries = Retries(5.0, 20.0, None)
    assert retries.wait_s(100.0) == 5.0
    assert retries.should_retry(State.PREFILLING, PodLost("x"), DECISION, 104.0)
    assert retries.wait_s(106.0) == 20.0
    assert retries.wait_s(126.0) == 0.0


def test_a_pod_that_never_had_the_request_does_not_prolong_its_wait() -> None:
    retries = Retries(5.0, 20.0, None)
    assert retries.wait_s(100.0) == 5.0
    assert retries.should_retry(State.RESERVING, PodUnavailable("x"), DECISION, 101.0)
    assert retries.wait_s(101.0) == 4.0


def test_a_lost_pod_never_shortens_the_wait() -> None:
    retries = Retries(60.0, 20.0, None)
    retries.progressed()
    assert retries.wait_s(100.0) == 60.0


def test_a_deadline_is_waited_for() -> None:
    retries = Retries(5.0, 20.0, deadline=160.0)
    assert retries.wait_s(100.0) == pytest.approx(59.95), "a little less, so that the client hears why"


def test_a_replay_that_finds_no_pod_fails_for_what_happened_before() -> None:
    retries, refusal = Retries(5.0, 20.0, None), Overloaded("waited 5 s")
    assert retries.explain(refusal) is refusal
    retries.should_retry(State.DECODING, PodUnavailable("d died", pod_id="d"), DECISION, 0.0)
    explained = retries.explain(refusal)
    assert isinstance(explained, PodUnavailable)
    assert (explained.message, explained.pod_id) == ("d died; to go on elsewhere: waited 5 s", "d")
