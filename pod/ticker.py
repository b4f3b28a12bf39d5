"""Periodic work that exists only some of the time: leases and credits to expire, notifications to read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Ticker:
    """Calls `tick` every `interval_s` as long as it returns True, else waits for `wake()` or `idle_s`."""

    def __init__(self, tick: Callable[[], bool], *, interval_s: float, idle_s: float = 1.0) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._idle_s = idle_s
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, name: str) -> None:
        self._task = asyncio.create_task(self._run(), name=name)

    def wake(self) -> None:
        self._awake.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            self._awake.clear()
            if self._tick():
                await asyncio.sleep(self._interval_s)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s):
                    await self._awake.wait()
