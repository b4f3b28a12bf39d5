"""Requests that wait for room on pods: by priority, then arrival at the router; bounded.

`pump` is called whenever something may have changed and gives every waiter a try, best first. It stops at the first
that is refused, so that nobody overtakes it, unless that one is picky: a replay that may not use some pods must not
hold up those that may.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Placed = TypeVar("Placed")


@dataclass(slots=True, eq=False)
class _Waiter(Generic[Placed]):
    key: tuple[int, float, int]  # priority, arrival of the request, order of coming here
    attempt: Callable[[], Placed | None]  # raises to refuse for good
    is_picky: bool
    future: asyncio.Future[Placed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class QueueFull(Exception):
    """Too many wait: the last in order has to go."""


class WaitQueue(Generic[Placed]):
    """`undo` takes back what an attempt placed when its waiter has gone in the same moment."""

    def __init__(self, max_waiting: int, undo: Callable[[Placed], None]) -> None:
        self._max_waiting = max_waiting
        self._undo = undo
        self._numbers = itertools.count()
        self._waiters: list[_Waiter[Placed]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def place(
        self,
        attempt: Callable[[], Placed | None],
        *,
        priority: int,
        arrived_at: float,
        is_picky: bool,
        wait_s: float,
    ) -> Placed:
        """What `attempt` returns, when it is this waiter's turn. Raises TimeoutError, QueueFull, or its exception."""
        waiter = _Waiter((priority, arrived_at, next(self._numbers)), attempt, is_picky)
        bisect.insort(self._waiters, waiter, key=lambda w: w.key)
        self.pump()
        if len(self._waiters) > self._max_waiting:
            self._waiters.pop().future.set_exception(QueueFull())
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(waiter.future)
        except BaseException:
            self._leave(waiter)
            raise

    def pump(self) -> None:
        """Gives every waiter its try, in order."""
        for waiter in list(self._waiters):
            if not self._try(waiter) and not waiter.is_picky:
                return

    def _try(self, waiter: _Waiter[Placed]) -> bool:
        """True when the waiter need not wait any more."""
        try:
            placed = waiter.attempt()
        except Exception as error:  # noqa: BLE001  # it belongs to the waiter, which raises it
            waiter.future.set_exception(error)
        else:
            if placed is None:
                return False
            waiter.future.set_result(placed)
        self._waiters.remove(waiter)
        return True

    def _leave(self, waiter: _Waiter[Placed]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            waiter.future.cancel()
        elif waiter.future.exception() is None:
            self._undo(waiter.future.result())
