"""Start in stages, restart what dies, stop in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.process import Process, ProcessFailed, ProcessSpec
from pdserve.supervisor import FIRST_DELAY_S, MAX_DELAY_S, STABLE_S, Backoff, Phase, ProcessEvent, Supervisor
from tests.pdserve import scripts


class Events:
    """Collects events, and lets a test await one."""

    def __init__(self) -> None:
        self.all: list[ProcessEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, event: ProcessEvent) -> None:
        self.all.append(event)
        self._changed.set()

    def names(self, phase: Phase) -> list[str]:
        return [event.name for event in self.all if event.phase is phase]

    async def count(self, phase: Phase, num: int) -> None:
        async with asyncio.timeout(20):
            while len(self.names(phase)) < num:
                self._changed.clear()
                await self._changed.wait()


def make(tmp_path: Path, events: Events, *specs: ProcessSpec) -> Supervisor:
    processes = [Process(spec, tmp_path / f"{spec.name}.log") for spec in specs]
    return Supervisor(processes, events, start_timeout_s=20)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    await supervisor.start()
    keeper = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await supervisor.stop()


async def test_stages_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    events = Events()
    stages = {"registry": 0, "pod": 1, "gateway": 2}
    specs = [scripts.spec(scripts.SERVE, name, stage=stage) for name, stage in stages.items()]
    async with running(make(tmp_path, events, *reversed(specs))):
        assert events.names(Phase.READY) == ["registry", "pod", "gateway"]
    assert events.names(Phase.STOPPED) == ["gateway", "pod", "registry"]


async def test_a_killed_process_is_reported_and_comes_back(tmp_path: Path) -> None:
    events = Events()
    supervisor = make(tmp_path, events, scripts.spec(scripts.SERVE, "pod"), scripts.spec(scripts.SERVE, "router"))
    async with running(supervisor):
        victim = supervisor.processes[0]
        before = victim.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await events.count(Phase.READY, 3)
        assert events.names(Phase.DIED) == ["pod"]
        died = next(event for event in events.all if event.phase is Phase.DIED)
        assert died.detail.startswith("was killed by SIGKILL\n")
        assert died.seconds == FIRST_DELAY_S
        assert victim.pid not in (None, before)


async def test_a_failed_start_names_the_process_and_leaves_nothing(tmp_path: Path) -> None:
    supervisor = make(tmp_path, Events(), scripts.spec(scripts.SERVE, "fine"), scripts.spec(scripts.FAILING, "broken"))
    with pytest.raises(ProcessFailed, match="broken exited with code 3"):
        await supervisor.start()
    await supervisor.stop()
    assert [process.pid for process in supervisor.processes] == [None, None]


async def test_kill_ends_what_ignores_sigterm_at_once(tmp_path: Path) -> None:
    events = Events()
    supervisor = make(tmp_path, events, scripts.spec(scripts.STUBBORN, stop_grace_s=600))
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    await events.count(Phase.STOPPING, 1)
    supervisor.kill()
    async with asyncio.timeout(20):
        await stopping


def test_backoff_doubles_up_to_a_limit_and_forgets_after_a_stable_run() -> None:
    backoff = Backoff()
    delays = [backoff.next_delay_s(ran_s=1.0) for _ in range(7)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, MAX_DELAY_S, MAX_DELAY_S]
    assert backoff.next_delay_s(ran_s=STABLE_S) == FIRST_DELAY_S
