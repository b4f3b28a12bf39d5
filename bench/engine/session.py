"""Runs the phases: starts their arms, takes turns among them round by round, and stops all whatever happens.

The order of the arms turns round from one round to the next, so that a machine that grows slower favours nobody. What
cannot be started or fails is left out from then on, and the report says why.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from bench.engine.arms import Arm
from bench.engine.cases import Measured
from bench.engine.catalogue import CASE_ARMS, PHASES
from bench.engine.client import RequestFailed
from bench.engine.goals import Key
from bench.engine.servers import NotRun

MEASURE_TIMEOUT_S = 900.0
IDLE_S = 3.0
Say = Callable[[str], None]


@dataclass(slots=True)
class Record:
    """What was measured, round by round (those of a later phase come after those of an earlier), and what was not."""

    rounds: list[dict[Key, float]] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


def arms_of(cases: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Of all `wanted` arms those that any of `cases` needs, in the order of the catalogue."""
    return [arm for arm in dict.fromkeys(arm for case in cases for arm in CASE_ARMS[case]) if arm in wanted]


class Session:
    def __init__(self, make: Callable[[str], Awaitable[Arm]], say: Say) -> None:
        self.record = Record()
        self._make = make
        self._say = say
        self._arms: dict[str, Arm] = {}

    async def run(self, cases: Sequence[str], wanted: Sequence[str], num_rounds: int) -> None:
        for phase in PHASES:
            chosen = [case for case in phase if case in cases]
            try:
                await self._start(arms_of(chosen, wanted))
                for number in range(num_rounds):
                    await self._round(chosen, number)
            finally:
                await self._stop()

    async def _start(self, names: Sequence[str]) -> None:
        for name in names:
            began = time.monotonic()
            try:
                arm = await self._make(name)
                await arm.start()
            except (NotRun, RequestFailed) as error:
                self._leave_out(name, str(error))
                continue
            self._arms[name] = arm
            idle = await idle_cores(arm.pids())
            self.record.rounds.append({(name, "idle_cores"): idle})
            arm.freeze()
            self._say(f"{name}: ready after {time.monotonic() - began:.0f} s; idle it takes {idle:.2f} cores")

    async def _round(self, cases: Sequence[str], number: int) -> None:
        found: dict[Key, float] = {}
        self.record.rounds.append(found)
        for case in cases:
            names = [name for name in CASE_ARMS[case] if name in self._arms]
            for name in names if number % 2 == 0 else reversed(names):
                found.update(await self._turn(name, case, number))

    async def _turn(self, name: str, case: str, number: int) -> dict[Key, float]:
        """One measurement, with the cores that the client and everybody else took meanwhile."""
        arm = self._arms[name]
        arm.thaw()
        before = CpuTimes.now(arm.pids())
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):  # wait_for may swallow a cancellation
                measured = await arm.measure(case, number)
        except (NotRun, RequestFailed, TimeoutError) as error:
            self._leave_out(name, f"{case}: {error or f'no end in {MEASURE_TIMEOUT_S:.0f} s'}")
            del self._arms[name]
            await arm.stop()
            return {}
        cores = CpuTimes.now(arm.pids()).cores_since(before)
        arm.freeze()
        self._say(f"round {number}, {case}, {name}: {describe(measured)}; {describe(cores)}")
        return {(name, metric): value for metric, value in {**measured, **prefixed(case, cores)}.items()}

    def _leave_out(self, name: str, why: str) -> None:
        self.record.not_run.setdefault(name, why)
        self._say(f"{name}: NOT-RUN ({why})")

    async def _stop(self) -> None:
        for arm in reversed(list(self._arms.values())):
            await arm.stop()
        self._arms.clear()


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of CPU: of the whole machine, of a server, of this process."""

    at: float
    machine: float
    server: float
    client: float

    @classmethod
    def now(cls, pids: Sequence[int]) -> CpuTimes:
        times = psutil.cpu_times()
        idle = times.idle + times.iowait
        return cls(time.monotonic(), sum(times[:8]) - idle, cpu_s(pids), time.process_time())

    def cores_since(self, before: CpuTimes) -> Measured:
        seconds = self.at - before.at
        server, client = self.server - before.server, self.client - before.client
        others = max(0.0, self.machine - before.machine - server - client)
        return {name: value / seconds for name, value in (("server", server), ("client", client), ("others", others))}


def cpu_s(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


async def idle_cores(pids: Sequence[int]) -> float:
    """How many cores `pids` take while nobody asks them anything."""
    before, began = cpu_s(pids), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (cpu_s(pids) - before) / (time.monotonic() - began)


def prefixed(case: str, cores: Measured) -> Measured:
    return {f"{case}.{name}_cores": value for name, value in cores.items()}


def describe(measured: Measured) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in measured.items())


def own_cores(count: int) -> frozenset[int]:
    """The first `count` cores that this process may use."""
    return frozenset(sorted(os.sched_getaffinity(0))[:count])
