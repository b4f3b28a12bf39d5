"""Where calls wait, in order of arrival, for blocks of this pod."""

from __future__ import annotations

import asyncio

from engine.batch import Reservation
from engine.sequence import SequenceSpec
from pod.engine_thread import EngineThread


class BlockQueue:
    """First come, first served: whoever is at the head keeps trying, everyone else waits behind it.

    A caller that is cancelled leaves the queue; blocks it may have got in that moment are its caller's to free.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._head = asyncio.Lock()  # asyncio's locks are fair
        self._freed = asyncio.Event()
        self.num_waiting = 0

    def notify(self) -> None:
        """Blocks may have become free."""
        if self.num_waiting:
            self._freed.set()

    async def reserve(self, spec: SequenceSpec, wait_s: float) -> Reservation:
        """Raises TimeoutError after `wait_s` without blocks, ValueError when the sequence can never fit."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(wait_s) as timer, self._head:
                while (reservation := await self._try(spec, timer)) is None:
                    await self._freed.wait()
                return reservation
        finally:
            self.num_waiting -= 1

    async def _try(self, spec: SequenceSpec, timer: asyncio.Timeout) -> Reservation | None:
        """A try takes an engine step at most and is not waiting, so the timer stands still: 0 s still gets one."""
        deadline = timer.when()
        timer.reschedule(None)
        self._freed.clear()
        try:
            return await self._engine.call(lambda core: core.reserve(spec))
        finally:
            timer.reschedule(deadline)
