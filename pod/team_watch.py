"""Ends a tensor-parallel pod with the first of its processes that dies, whether or not it computes then."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from engine.core import EngineCore
from pod.engine_thread import EngineThread

if TYPE_CHECKING:
    from engine.tensor_parallel.team import Team  # loads torch

PATIENCE_S = 1.0  # for the engine to notice by itself, which lets it say first what it has computed


class TeamWatch:
    """Start on the running loop. Without a team it does nothing."""

    def __init__(self, team: Team | None, engine: EngineThread) -> None:
        self._team = team
        self._engine = engine
        self._watched: dict[int, int] = {}  # pid -> its descriptor, which becomes readable when the process ends
        self._timers: list[asyncio.TimerHandle] = []

    def start(self) -> None:
        if self._team is None:
            return
        for pid in self._team.pids:
            self._watched[pid] = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._watched[pid], self._on_death, self._team, pid)

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for pid in list(self._watched):
            self._unwatch(pid)

    async def close(self) -> None:
        """Ends the processes; nothing may compute any more."""
        if self._team:
            await asyncio.to_thread(self._team.close)

    def _on_death(self, team: Team, pid: int) -> None:
        self._unwatch(pid)

        def fail(_: EngineCore) -> None:
            raise team.lost()

        self._engine.post(fail)
        # In one of some thousand deaths gloo does not notice: a step then hangs until the group's timeout.
        give_up = asyncio.get_running_loop().call_later(PATIENCE_S, lambda: self._engine.give_up(team.lost()))
        self._timers.append(give_up)

    def _unwatch(self, pid: int) -> None:
        descriptor = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
