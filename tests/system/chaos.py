"""Chaos, from a seed: clients ask all kinds of things while processes are killed, frozen, drained and restarted.

    python -m tests.system.chaos --seed 7                 # one round
    python -m tests.system.chaos --seed 7 --minutes 10    # rounds of seeds 7, 8, ... for ten minutes

A round starts a stack on the fake engine, runs requests from NUM_CLIENTS clients through it and lets faults happen as
answers progress. At least one decode pod is always sound, so every request must succeed with exactly the right answer,
unless its own client ended it or the router died under it. Then nobody may hold anything any more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from router.client import RouterClient
from tests.system.chaos_faults import Monkey, Progress, Report
from tests.system.chaos_requests import Case, Outcome, draw_case, judge, run_case
from tests.system.chaos_stack import ChaosStack, Member, running

NUM_CLIENTS = 10
NUM_REQUESTS = 150
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Round:
    """The shape of a deployment, drawn from the seed."""

    num_routers: int
    num_prefill: int
    num_decode: int
    num_blocks: int
    pod: dict[str, object]

    @classmethod
    def draw(cls, seed: int) -> Round:
        rng = Random(f"{seed}/round")
        num_blocks = rng.choice((40, 96, 256))
        pod: dict[str, object] = {
            "num_blocks": num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": rng.choice((4, 16)),
            "max_batched_tokens": rng.choice((32, 128)),
            "fake_step_s": rng.choice((0.001, 0.004)),
            "fake_prefill_s_per_token": rng.choice((0.0, 0.0005)),
        }
        return cls(rng.randrange(1, 3), rng.randrange(1, 4), rng.randrange(2, 4), num_blocks, pod)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that fits into any pod."""
        return self.num_blocks * BLOCK_SIZE


class Clients:
    """NUM_CLIENTS clients that share a queue of cases; each has a router of its own."""

    def __init__(self, stack: ChaosStack, monkey: Monkey, progress: Progress, report: Report) -> None:
        self._stack = stack
        self._monkey = monkey
        self._progress = progress
        self._report = report

    async def run(self, cases: Iterator[Case]) -> None:
        routers = itertools.islice(itertools.cycle(self._stack.routers), NUM_CLIENTS)
        await asyncio.gather(*(self._client(router, cases) for router in routers))

    async def _client(self, router: Member, cases: Iterator[Case]) -> None:
        """One connection for as long as the router lives."""
        deaths = self._monkey.router_deaths
        for case in cases:
            await self._monkey.router_up[router].wait()
            known_deaths = deaths[router]
            async with RouterClient(router.ready["address"]) as client:
                await self._ask(client, router, case)
                while known_deaths == deaths[router] and (following := next(cases, None)) is not None:
                    await self._ask(client, router, following)

    async def _ask(self, client: RouterClient, router: Member, case: Case) -> None:
        deaths = self._monkey.router_deaths[router]
        try:
            outcome = await run_case(client, case, self._progress.tick)
        except TimeoutError as error:
            self._report.problems.append(str(error))
            return
        router_died = deaths != self._monkey.router_deaths[router]
        self._report.problems += [f"{case.name}: {p}" for p in judge(case, outcome, router_died=router_died)]
        self._report.ends[_name_of_end(outcome)] += 1


def _name_of_end(outcome: Outcome) -> str:
    if outcome.error is not None:
        return type(outcome.error).__name__
    return "left" if outcome.left else "answered"


async def run_round(seed: int, num_requests: int = NUM_REQUESTS, keep_logs: Path | None = None) -> Report:
    """`keep_logs`: where the members' logs go when something was wrong."""
    shape = Round.draw(seed)
    report, progress, done = Report(), Progress(), asyncio.Event()
    cases = (draw_case(str(seed), number, shape.capacity) for number in range(num_requests))
    async with running(shape.num_prefill, shape.num_decode, shape.pod, shape.num_routers) as stack:
        monkey = Monkey(stack, Random(f"{seed}/faults"), progress, report)
        async with asyncio.TaskGroup() as group:
            group.create_task(monkey.run(done))
            await Clients(stack, monkey, progress, report).run(cases)
            done.set()
        report.problems += await stack.idle_problems()
        report.problems += await stack.stop()
        report.problems += stack.logged_errors()
        if report.problems and keep_logs is not None:
            shutil.copytree(stack.directory, keep_logs / f"seed-{seed}", ignore=shutil.ignore_patterns("run", "tmp"))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.chaos", description="Seeded chaos on the fake engine."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with the following seeds for so long")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of each round")
    parser.add_argument("--keep-logs", type=Path, help="where logs of rounds with problems go")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left running then either
    deadline = time.monotonic() + 60 * arguments.minutes
    seed, failed = arguments.seed, False
    while True:
        report = asyncio.run(run_round(seed, arguments.requests, arguments.keep_logs))
        print(f"seed {seed}: {Round.draw(seed)}\n  {dict(report.ends)}\n  {dict(report.faults)}", flush=True)
        for line in (*report.story, *report.problems) if report.problems else ():
            print(f"    {line}", flush=True)
        failed |= bool(report.problems)
        seed += 1
        if time.monotonic() >= deadline:
            return int(failed)


if __name__ == "__main__":
    sys.exit(main())
