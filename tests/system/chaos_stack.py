"""The processes of the chaos suite: a registry, routers, prefill and decode pods, each killed and restarted by name.

They are started by hand, one by one, because the launcher's supervisor would bring the dead back by itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from pdserve.paths import ROOT
from tests.support.http import scrape
from tests.support.polling import until
from tests.support.ports import free_port
from tests.support.registry import RegistryServer

READY_S = 60.0
IDLE_S = 30.0  # leases of a killed router last 10 s, its connections are given up within 10 s
STOP_S = 45.0
DRAIN_TIMEOUT_S = 30.0
HELD = ("sequences_waiting", "sequences_running", "leases", "credits", "transfers", 'blocks{state="used"}')
CLUSTER = "chaos"

Flags = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes from the machine."""

    num_fds: int
    num_threads: int
    rss_bytes: int


class Member:
    """One process by name, restarted in place: `flags` are its settings. What it says on stderr goes to `log`."""

    def __init__(self, name: str, module: str, flags: Flags, directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.ready: dict[str, str] = {}
        self._module = module
        self._flags = dict(flags)
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start it first"
        return self._process

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, **flags: object) -> None:
        """Returns once it is ready. Raises EOFError with its last words when it ends instead."""
        pairs = (self._flags | flags).items()
        arguments = [part for name, value in pairs for part in (f"--{name.replace('_', '-')}", str(value))]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, *arguments),
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._directory / "tmp")},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None, "piped"
        async with asyncio.timeout(READY_S):
            while (line := (await self._process.stdout.readline()).decode()).startswith("WARNING "):
                pass  # of small caches, which are wanted here
        if not line.startswith("READY "):
            await self.process.wait()
            raise EOFError(f"{self.name} ended before it was ready: {self.log.read_text()[-500:]}")
        self.ready = dict(part.split("=", 1) for part in line.split()[1:] if "=" in part)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, which a frozen process obeys too."""
        if self.alive:
            self.process.kill()
        if self._process is not None:
            await self._process.communicate()  # to the end of its pipe, so that nothing of it is left here either

    async def ended(self) -> int:
        await asyncio.wait_for(self.process.communicate(), STOP_S)
        assert self.process.returncode is not None, "communicate() waits for the end"
        return self.process.returncode

    async def metrics(self) -> str:
        return await scrape(self.ready["metrics"])

    def footprint(self) -> Footprint:
        process = psutil.Process(self.process.pid)
        return Footprint(process.num_fds(), process.num_threads(), process.memory_info().rss)


class ChaosStack:
    """All members of one deployment, in `directory`."""

    def __init__(self, directory: Path, *, num_prefill: int, num_decode: int, pod: Flags, num_routers: int = 1) -> None:
        (directory / "tmp").mkdir()
        self.directory = directory
        self.registry = RegistryServer()
        common: dict[str, object] = {"model": "fake", "cluster": CLUSTER, "registry_url": self.registry.url}
        self.routers = [self._router(i, common) for i in range(num_routers)]
        self.prefill = [self._pod("prefill", i, common | dict(pod)) for i in range(num_prefill)]
        self.decode = [self._pod("decode", i, common | dict(pod)) for i in range(num_decode)]

    def _router(self, index: int, flags: dict[str, object]) -> Member:
        """On a port of its own, which it has again after a restart."""
        own = {"port": free_port(), "queue_wait_s": 60, "stop_grace_s": 0}
        return Member(f"router-{index}", "router", flags | own, self.directory)

    def _pod(self, role: str, index: int, flags: Flags) -> Member:
        own = {
            "pod_id": f"{role}-{index}",
            "runtime_dir": self.directory / "run",
            "num_threads": 1,
            "heartbeat_interval_s": 0.3,
            "drain_timeout_s": DRAIN_TIMEOUT_S,
        }
        return Member(f"{role}-{index}", f"{role}_service", {**own, **flags}, self.directory)

    @property
    def pods(self) -> list[Member]:
        return [*self.prefill, *self.decode]

    @property
    def members(self) -> list[Member]:
        """In the order of a stop that loses nothing."""
        return [*self.routers, *self.pods]

    async def start(self) -> None:
        await asyncio.to_thread(self.registry.start)
        await asyncio.gather(*(member.start() for member in self.members))

    async def kill(self) -> None:
        await asyncio.gather(*(member.kill() for member in self.members))
        self.registry.kill()

    async def stop(self) -> list[str]:
        """SIGTERM for all, as an operator does it. What is wrong with how they ended or what they left."""
        problems = []
        for member in self.members:
            member.send(signal.SIGTERM)
        for member in self.members:
            if (code := await member.ended()) != 0:
                problems.append(f"{member.name} ended with {code}")
        self.registry.kill()
        left = [*(self.directory / "tmp").iterdir()]
        return problems + ([f"temporary files are left: {left}"] if left else [])

    # What it holds.

    async def idle_problems(self) -> list[str]:
        """Waits until nobody holds anything; what is still held after IDLE_S, and failed self-checks."""
        try:
            await until(self._holds_nothing, IDLE_S)
        except TimeoutError:
            return [f"still held after {IDLE_S:.0f} s: {await self.held()}"]
        return [f"{pod.name}: its books do not balance" for pod in self.pods if await self._violations(pod)]

    async def _holds_nothing(self) -> bool:
        return not await self.held()

    async def held(self) -> dict[str, float]:
        """By "member metric": all that is not 0."""
        pages = {pod.name: await pod.metrics() for pod in self.pods}
        values = {
            f"{name} {metric}": _value(page, f"pdserve_{metric}") for name, page in pages.items() for metric in HELD
        }
        for router in self.routers:
            in_flight = re.findall(r"^pdserve_router_in_flight\S* (\S+)$", await router.metrics(), re.MULTILINE)
            values[f"{router.name} in_flight"] = sum(map(float, in_flight))
        return {name: value for name, value in values.items() if value}

    async def _violations(self, pod: Member) -> float:
        return _value(await pod.metrics(), "pdserve_invariant_violations_total")

    def logged_errors(self) -> list[str]:
        """Lines at level error, and tracebacks: nothing that chaos does is a bug."""
        suspicious = re.compile(r"^\S+ [EC] |^Traceback|never retrieved|was never awaited|exception ignored", re.I)
        logs = {member.name: member.log for member in self.members}
        return [
            f"{name}: {line}"
            for name, log in logs.items()
            for line in log.read_text(errors="replace").splitlines()
            if suspicious.search(line)
        ]


def _value(page: str, metric: str) -> float:
    found = re.search(rf"^{re.escape(metric)} (\S+)$", page, re.MULTILINE)
    assert found, f"no metric {metric}"
    return float(found[1])


@asynccontextmanager
async def running(num_prefill: int, num_decode: int, pod: Flags, num_routers: int = 1) -> AsyncIterator[ChaosStack]:
    """Everything is killed at the end, whatever state it is in."""
    with TemporaryDirectory(prefix="pd-chaos-") as directory:
        counts = {"num_prefill": num_prefill, "num_decode": num_decode, "num_routers": num_routers}
        stack = ChaosStack(Path(directory), pod=pod, **counts)
        try:
            await stack.start()
            yield stack
        finally:
            await stack.kill()
