"""What the chaos suite does to a stack, and how it is mended: a seeded script that follows the clients' progress."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from tests.system.chaos_stack import ChaosStack, Member

MAX_FAULTS_AT_ONCE = 3
CLIENTS_WAIT_S = 4.0  # a client's gRPC gives up a frozen router after this at the earliest
QUIET_S = 1.5  # a fault comes at the latest after so long, when no answer progresses


class Progress:
    """Counts the responses that clients get, and wakes who waits for more of them."""

    def __init__(self) -> None:
        self.count = 0
        self._grown = asyncio.Event()

    def tick(self) -> None:
        self.count += 1
        self._grown.set()

    async def more(self, amount: int, at_most_s: float) -> None:
        """Returns after `amount` more responses, or `at_most_s`."""
        target = self.count + amount
        try:
            async with asyncio.timeout(at_most_s):
                while self.count < target:
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            return


@dataclass(slots=True)
class Report:
    """What a round has seen."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)


class Monkey:
    """Breaks things, and mends what it broke. `sound` pods are up, running and not asked to leave."""

    def __init__(self, stack: ChaosStack, rng: Random, progress: Progress, report: Report) -> None:
        self._stack = stack
        self._rng = rng
        self._progress = progress
        self._report = report
        self._started = time.monotonic()
        self._sound = set(stack.pods)
        self._registry_up = asyncio.Event()
        self._registry_up.set()
        self._num_mending = 0
        self.router_deaths: Counter[Member] = Counter()
        self.router_up = {router: asyncio.Event() for router in stack.routers}
        for up in self.router_up.values():
            up.set()
        self._faults: dict[Callable[[], Awaitable[None]], int] = {
            self._kill_pod: 10,
            self._freeze_pod: 8,
            self._drain_pod: 6,
            self._kill_registry: 4,
            self._freeze_registry: 2,
            self._kill_router: 1,
            self._freeze_router: 1,
        }

    async def run(self, done: asyncio.Event) -> None:
        """Faults until `done`; returns when all is mended. What cannot be mended ends it with an ExceptionGroup."""
        async with asyncio.TaskGroup() as mending:
            while not done.is_set():
                await self._progress.more(self._rng.randrange(10, 250), QUIET_S)
                if self._num_mending < MAX_FAULTS_AT_ONCE and not done.is_set():
                    fault = self._rng.choices(list(self._faults), list(self._faults.values()))[0]
                    mending.create_task(self._mend_after(fault))

    async def _mend_after(self, fault: Callable[[], Awaitable[None]]) -> None:
        self._num_mending += 1
        await fault()
        self._num_mending -= 1

    def _victim(self) -> Member | None:
        """A sound pod; never the last sound decode pod."""
        decodes = [pod for pod in self._stack.decode if pod in self._sound]
        prefills = [pod for pod in self._stack.prefill if pod in self._sound]
        candidates = prefills + (decodes if len(decodes) > 1 else [])
        if not candidates:
            return None
        victim = self._rng.choice(candidates)
        self._sound.discard(victim)
        return victim

    def _note(self, what: str, name: str) -> None:
        self._report.faults[what] += 1
        self._report.story.append(f"{time.monotonic() - self._started:7.2f} {what} {name}")

    async def _kill_pod(self) -> None:
        if (pod := self._victim()) is None:
            return
        same_port, wait = self._rng.random() < 0.5, self._rng.randrange(0, 300)
        self._note("kill", pod.name)
        await pod.kill()
        await self._progress.more(wait, QUIET_S)
        await self._restart(pod, same_port=same_port)

    async def _drain_pod(self) -> None:
        if (pod := self._victim()) is None:
            return
        self._note("drain", pod.name)
        pod.send(signal.SIGTERM)
        if (code := await pod.ended()) != 0:
            self._report.problems.append(f"{pod.name} drained and ended with {code}")
        await self._restart(pod, same_port=False)

    async def _restart(self, pod: Member, *, same_port: bool) -> None:
        """As an orchestrator does: a pod that finds no registry ends, and is started again when there is one."""
        port = pod.ready["address"].rpartition(":")[2] if same_port else 0
        while True:
            await self._registry_up.wait()
            try:
                await pod.start(port=port)
            except EOFError as error:
                if "cannot reach the registry" not in str(error):
                    raise
            else:
                break
        self._sound.add(pod)
        self._note("back", pod.name)

    async def _freeze_pod(self) -> None:
        if (pod := self._victim()) is None:
            return
        seconds = self._rng.choice((0.1, 1.0, 2.5, 4.0, 8.0))
        self._note(f"freeze {seconds} s", pod.name)
        pod.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)  # the fault itself
        pod.send(signal.SIGCONT)
        self._sound.add(pod)
        self._note("thaw", pod.name)

    async def _kill_registry(self) -> None:
        if not self._registry_up.is_set():
            return
        self._registry_up.clear()
        wait = self._rng.randrange(0, 400)
        self._note("kill", "registry")
        await asyncio.to_thread(self._stack.registry.kill)
        await self._progress.more(wait, QUIET_S)
        await asyncio.to_thread(self._stack.registry.start)
        self._registry_up.set()
        self._note("back", "registry")

    async def _freeze_registry(self) -> None:
        if not self._registry_up.is_set():
            return
        self._registry_up.clear()
        seconds = self._rng.choice((0.5, 3.0))
        self._note(f"freeze {seconds} s", "registry")
        self._stack.registry.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)  # the fault itself
        self._stack.registry.send(signal.SIGCONT)
        self._registry_up.set()
        self._note("thaw", "registry")

    async def _freeze_router(self) -> None:
        """Clients give it up after about 6 s, pods after 8 s."""
        router, seconds = self._rng.choice(self._stack.routers), self._rng.choice((0.5, 2.5, 12.0))
        if not self.router_up[router].is_set():
            return
        self.router_up[router].clear()
        self.router_deaths[router] += seconds > CLIENTS_WAIT_S
        self._note(f"freeze {seconds} s", router.name)
        router.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)  # the fault itself
        router.send(signal.SIGCONT)
        self.router_up[router].set()
        self._note("thaw", router.name)

    async def _kill_router(self) -> None:
        router = self._rng.choice(self._stack.routers)
        if not self.router_up[router].is_set():
            return
        self.router_up[router].clear()
        self.router_deaths[router] += 1
        self._note("kill", router.name)
        await router.kill()
        await router.start()
        self.router_up[router].set()
        self._note("back", router.name)
