"""Whether this process stood still a moment ago, so that what failed then is no fault of the pods'."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

TICK_S = 0.25
STANDSTILL_S = 5.0  # between two ticks; after shorter ones all links are still there
AFTERMATH_S = 1.0  # in which all that broke meanwhile is found


class Standstill:
    """`start` on the running loop, `stop` at the end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ran_at = clock()
        self._over_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.is_recent()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self.start)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def is_recent(self) -> bool:
        """Also before the first tick after it: nobody knows what runs first then."""
        now = self._clock()
        if now - self._ran_at > STANDSTILL_S:
            self._over_at = now + AFTERMATH_S
        self._ran_at = now
        return now < self._over_at
