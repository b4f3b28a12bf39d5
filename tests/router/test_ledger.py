"""The stages of a ledger add up to its wall time, whatever pods report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger import STAGES, Ledger


def entries(ledger: Ledger) -> dict[str, float]:
    return {e.stage: e.seconds for e in ledger.to_proto("r", "c", "stop").entries}


def test_by_hand() -> None:
    ledger = Ledger(10.0)
    ledger.account("queue", 10.5)
    ledger.account("credit", 10.75)
    ledger.account_parts({"prefill_queue": 0.5, "prefill": 1.0}, 12.5)
    ledger.first_token(12.5)
    ledger.account("decode", 14.0)
    assert entries(ledger) == {
        "queue": 0.5,
        "credit": 0.25,
        "prefill_queue": 0.5,
        "prefill": 1.0,
        "other": 0.25,
        "decode": 1.5,
    }
    assert (ledger.wall_s, ledger.ttft_s) == (4.0, 2.5)


def test_what_pods_claim_is_clipped_to_the_time_that_passed() -> None:
    ledger = Ledger(0.0)
    ledger.account_parts({"prefill_queue": 5.0, "prefill": -1.0, "transfer": 3.0}, 2.0)
    assert entries(ledger) == {"prefill_queue": 2.0}


def test_the_first_token_is_the_first() -> None:
    ledger = Ledger(0.0)
    ledger.first_token(1.0)
    ledger.first_token(2.0)
    assert ledger.ttft_s == 1.0


def test_attempts_and_failures() -> None:
    ledger = Ledger(0.0)
    ledger.fail_attempt("none was begun")
    ledger.begin_attempt("p1", "d1", "because")
    ledger.fail_attempt("d1 died")
    ledger.begin_attempt("", "d2", "alone")
    shown = ledger.to_proto("r", "c", "length")
    assert [(a.prefill_pod, a.decode_pod, a.failure) for a in shown.attempts] == [
        ("p1", "d1", "d1 died"),
        ("", "d2", ""),
    ]
    assert (shown.request_id, shown.client_request_id, shown.outcome) == ("r", "c", "length")


seconds = st.floats(-10, 100, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.floats(-1, 10, allow_nan=False), st.dictionaries(st.sampled_from(STAGES), seconds, max_size=4)),
        max_size=20,
    )
)
def test_it_always_adds_up(steps: list[tuple[float, dict[str, float]]]) -> None:
    ledger, now = Ledger(100.0), 100.0
    for elapsed, parts in steps:
        now += elapsed  # even a clock that steps back
        if parts:
            ledger.account_parts(parts, now)
        else:
            ledger.account("decode", now)
    found = entries(ledger)
    assert sum(found.values()) == pytest.approx(ledger.wall_s, abs=1e-9)
    assert all(value > 0 for value in found.values())
