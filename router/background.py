"""Short tasks that outlive the request which began them: telling pods what is to be freed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from proto.errors import PdserveError

log = logging.getLogger(__name__)


def current_task_is_cancelled() -> bool:
    """Tells a cancellation of the task that runs from one of what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Background:
    """Owns its tasks. A pod's error is expected (it may be dead) and noted; any other is a bug, logged as one."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PdserveError):
            log.info("%s: %s", task.get_name(), error)
        else:
            log.error("%s failed", task.get_name(), exc_info=error)

    async def idle(self) -> None:
        """Returns when nothing is left to do."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self, grace_s: float) -> None:
        """Cancels what is not done within `grace_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await self.idle()

    def __len__(self) -> int:
        return len(self._tasks)
