"""Tells the operator of requests that are tried again, in few lines when there are many of them.

The first failure of a kind is told at once and in full. Those that follow it are counted and told once a second, for as
long as there are any: under load hundreds of requests may wait for the same pod, or be lost with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from proto.errors import PdserveError
from router.lifecycle import State

log = logging.getLogger(__name__)

PERIOD_S = 1.0

Kind = tuple[State, type[PdserveError], str]  # what the request was doing, what went wrong, the pod that it was with


@dataclass(slots=True)
class _Tally:
    """What came after the last line of a kind."""

    num_failures: int = 0
    request_ids: set[str] = field(default_factory=set)
    last: str = ""


def _call_later(delay_s: float, callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class RetryLog:
    def __init__(self, call_later: Callable[[float, Callable[[], None]], object] = _call_later) -> None:
        self._call_later = call_later
        self._tallies: dict[Kind, _Tally] = {}  # of the kinds that were told less than a period ago

    def note(self, request_id: str, state: State, error: PdserveError) -> None:
        """`request_id`'s attempt failed with `error` while it was `state`, and it will be tried again."""
        kind = (state, type(error), error.pod_id)
        tally = self._tallies.get(kind)
        if tally is None:
            log.warning("request %s, %s: %s; trying again", request_id, _doing(kind), error)
            self._begin(kind)
            return
        tally.num_failures += 1
        tally.request_ids.add(request_id)
        tally.last = str(error)

    def _begin(self, kind: Kind) -> None:
        self._tallies[kind] = _Tally()
        self._call_later(PERIOD_S, lambda: self._tell(kind))

    def _tell(self, kind: Kind) -> None:
        tally = self._tallies.pop(kind)
        if not tally.num_failures:
            return
        num_requests = len(tally.request_ids)
        many = f"{num_requests} requests" if num_requests > 1 else "1 request"
        log.warning(
            "in %g s %s more (%d tries), %s: %s; trying again",
            PERIOD_S, many, tally.num_failures, _doing(kind), tally.last,
        )  # fmt: skip
        self._begin(kind)


def _doing(kind: Kind) -> str:
    state, _, pod_id = kind
    return f"{state.value} on {pod_id}" if pod_id else state.value
