"""A pod that has come to rest checks its own books: in production as in tests, a leak is reported when it happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.batch import EngineLoad
from engine.core import EngineCore
from pod.engine_thread import EngineThread
from pod.role import Role
from proto.errors import InternalError

log = logging.getLogger(__name__)


class SelfCheck:
    """Every `interval_s`, after activity and while nothing is owed, compares the engine's books with the role's."""

    def __init__(self, engine: EngineThread, role: Role, on_violation: Callable[[], None], interval_s: float) -> None:
        self._engine = engine
        self._role = role
        self._on_violation = on_violation
        self._interval_s = interval_s
        self._active = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="self-check")

    def note_activity(self) -> None:
        self._active = True

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def check(self) -> None:
        """Raises AssertionError naming what leaked. Does nothing while something is owed, before or after."""
        if not self._role.is_idle:
            return
        load = await self._engine.call(checked_load)
        if self._role.is_idle:
            self._active = False
            self._role.check_invariants(load)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._active:
                await self._report()

    async def _report(self) -> None:
        try:
            await self.check()
        except AssertionError as error:
            self._active = False  # once per leak, not once per interval
            self._on_violation()
            log.error("the pod's books do not balance: %s", error)
        except InternalError as error:  # the engine has ended
            log.debug("no self-check: %s", error)


def checked_load(core: EngineCore) -> EngineLoad:
    core.check_invariants()
    return core.load()
