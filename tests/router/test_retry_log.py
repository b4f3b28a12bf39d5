"""Many requests that are tried again are few lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proto.errors import Overloaded
from router.failures import PodLost
from router.lifecycle import State
from router.retry_log import RetryLog


class Timers:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def pass_period(self) -> None:
        due, self.callbacks = self.callbacks, []
        for callback in due:
            callback()


def test_one_line_at_once_then_one_a_period_as_long_as_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers()
    retry_log = RetryLog(timers.call_later)
    for try_ in range(2):
        for request in range(3):
            retry_log.note(f"r{request}", State.RESERVING, Overloaded(f"full, {try_}", pod_id="d"))
    assert caplog.messages == ["request r0, reserving on d: full, 0; trying again"]
    timers.pass_period()
    assert caplog.messages[1:] == ["in 1 s 3 requests more (5 tries), reserving on d: full, 1; trying again"]
    retry_log.note("r4", State.RESERVING, Overloaded("full, 2", pod_id="d"))
    timers.pass_period()
    assert caplog.messages[2:] == ["in 1 s 1 request more (1 tries), reserving on d: full, 2; trying again"]
    timers.pass_period()
    assert (len(caplog.messages), timers.callbacks) == (3, [])
    retry_log.note("r5", State.RESERVING, Overloaded("full, 3", pod_id="d"))
    assert caplog.messages[3:] == ["request r5, reserving on d: full, 3; trying again"]


def test_each_kind_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    retry_log = RetryLog(Timers().call_later)
    retry_log.note("r1", State.RESERVING, Overloaded("full", pod_id="d"))
    retry_log.note("r2", State.RESERVING, Overloaded("full", pod_id="e"))
    retry_log.note("r3", State.DECODING, PodLost("gone", pod_id="d"))
    retry_log.note("r4", State.RESERVING, PodLost("gone"))
    assert caplog.messages == [
        "request r1, reserving on d: full; trying again",
        "request r2, reserving on e: full; trying again",
        "request r3, decoding on d: gone; trying again",
        "request r4, reserving: gone; trying again",
    ]
