"""Keeps a set of processes running: start in stages, restart what dies, stop in the reverse order.

Whatever dies is restarted on the same command line, so on the same ports where that names them, after a delay that
doubles up to a limit. A process that dies before the whole set was ready is a failed start: everything is stopped and
the reason is raised.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.process import Process, ProcessFailed, ProcessSpec, endpoint

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
STABLE_S = 30.0


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    name: str
    phase: Phase
    seconds: float = 0.0  # READY: how long the start took; DIED: until the restart
    detail: str = ""  # READY: where it listens; DIED: how it ended, and the last lines of its log


@dataclass(slots=True)
class Backoff:
    """How long to wait before a restart: doubles while the process keeps dying, forgets once it ran for STABLE_S."""

    delay_s: float = 0.0

    def next_delay_s(self, ran_s: float) -> float:
        grown = min(self.delay_s * 2, MAX_DELAY_S) if ran_s < STABLE_S else 0.0
        self.delay_s = max(grown, FIRST_DELAY_S)
        return self.delay_s


class Supervisor:
    """Owns its processes. Call `start()`, then `run()` until cancelled, and `stop()` whatever happened."""

    def __init__(
        self,
        processes: Sequence[Process],
        on_event: Callable[[ProcessEvent], None],
        *,
        start_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.processes = tuple(processes)
        self._on_event = on_event
        self._start_timeout_s = start_timeout_s
        self._clock = clock

    async def start(self) -> None:
        """Starts the stages one after the other, each one's processes at once. Raises ProcessFailed."""
        for stage in _stages(self.processes, lambda spec: spec.start_stage):
            starts = [asyncio.create_task(self._start(process)) for process in stage]
            try:
                await asyncio.gather(*starts)
            finally:
                for task in starts:
                    task.cancel()
                await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, process: Process) -> None:
        began = self._clock()
        self._on_event(ProcessEvent(process.spec.name, Phase.STARTING))
        await process.start(self._start_timeout_s)
        where = endpoint(process.ready_fields)
        self._on_event(ProcessEvent(process.spec.name, Phase.READY, self._clock() - began, where))

    async def run(self) -> None:
        """Restarts whatever dies; returns only by cancellation."""
        async with asyncio.TaskGroup() as group:
            for process in self.processes:
                group.create_task(self._keep_alive(process))

    async def _keep_alive(self, process: Process) -> None:
        backoff = Backoff()
        while True:
            began = self._clock()
            how = await process.wait()
            delay_s = backoff.next_delay_s(self._clock() - began)
            self._report_death(process, how, delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self._start(process)
            except ProcessFailed:
                continue  # it has ended, so the next wait() returns at once and reports it

    def _report_death(self, process: Process, how: str, delay_s: float) -> None:
        detail = f"{how}\n{process.tail()}".rstrip()
        self._on_event(ProcessEvent(process.spec.name, Phase.DIED, delay_s, detail))

    async def stop(self) -> None:
        """Stops stage after stage. Safe to call at any time."""
        for stage in _stages(self.processes, lambda spec: spec.stop_stage):
            await asyncio.gather(*(self._stop(process) for process in stage))

    async def _stop(self, process: Process) -> None:
        if process.pid is not None:
            self._on_event(ProcessEvent(process.spec.name, Phase.STOPPING))
        await process.stop()
        self._on_event(ProcessEvent(process.spec.name, Phase.STOPPED))

    def kill(self) -> None:
        """SIGKILL to everything, for an impatient second Ctrl-C; `stop()` still has to be awaited."""
        for process in self.processes:
            process.send(signal.SIGKILL)


def _stages(processes: Sequence[Process], stage_of: Callable[[ProcessSpec], int]) -> list[list[Process]]:
    ordered = sorted(processes, key=lambda p: stage_of(p.spec))
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda p: stage_of(p.spec))]
