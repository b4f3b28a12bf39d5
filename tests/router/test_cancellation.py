"""Clients that leave, at every stage and together with a pod: the survivors free everything."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from proto.errors import Cancelled, DeadlineExceeded
from router.lifecycle import State
from router.request import Request
from tests.router.support import SLOW_STEPS, Outcome, long_running, on_entering, running_stack, until
from tests.router.test_faults import generate_and

LIVE_STATES = [state for state in State if not state.terminal and state is not State.QUEUED]


@pytest.mark.parametrize("state", LIVE_STATES)
async def test_cancelled_at_each_stage(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    prefill = 0 if state is State.STARTING else 1
    async with running_stack(registry_url, tmp_path, prefill=prefill, pod=SLOW_STEPS) as stack:
        on_entering(monkeypatch, state, lambda request: stack.router.requests.abort(request.id))
        with pytest.raises(Cancelled):
            await stack.generate(long_running(100, 200))
        await stack.until_rest()
        await stack.pods.assert_idle()
        assert (await stack.client.timeline()).outcome == "cancelled"


async def test_cancelled_while_queued(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=0, decode=0) as stack:
        task = asyncio.create_task(stack.generate(long_running(10, 10)))
        await until(lambda: stack.router.cluster.num_waiting == 1)
        task.cancel()
        await until(lambda: stack.router.cluster.num_waiting == 0)
        await asyncio.wait([task])


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_client_disconnects(
    registry_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, prefill: int
) -> None:
    async with running_stack(registry_url, tmp_path, prefill=prefill, pod=SLOW_STEPS) as stack:
        async with aclosing(stack.client.generate(long_running(100, 500))) as answer:
            async for response in answer:
                assert response.tokens
                break
        await stack.until_rest()
        await stack.pods.assert_idle()
        assert stack.router.requests.states() == []
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_at_random_moments(registry_url: str, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    async with running_stack(registry_url, tmp_path, prefill=2, decode=2, pod={"fake_step_s": 0.001}) as stack:

        async def leave_early(number: int) -> None:
            task = asyncio.create_task(stack.generate(long_running(rng.randrange(1, 200), 100, number)))
            await asyncio.wait([task], timeout=rng.uniform(0, 0.3))
            task.cancel()
            await asyncio.wait([task])

        await asyncio.gather(*(leave_early(number) for number in range(40)))
        await stack.until_rest()
        await stack.pods.assert_idle()


@pytest.mark.parametrize("state", LIVE_STATES)
async def test_cancel_and_death_together(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    prefill = 0 if state is State.STARTING else 1
    async with running_stack(registry_url, tmp_path, prefill=prefill, pod=SLOW_STEPS) as stack:
        tasks: list[asyncio.Task[None]] = []
        victim = stack.pods.pods[-1]

        def act(request: Request) -> None:
            stack.router.requests.abort(request.id)
            tasks.append(asyncio.create_task(stack.pods.kill(victim)))

        on_entering(monkeypatch, state, act)
        with pytest.raises(Cancelled):
            await stack.generate(long_running(100, 200))
        await asyncio.gather(*tasks)
        await stack.until_rest()
        await stack.pods.assert_idle()


async def test_the_deadline_passes(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack:
        with pytest.raises(DeadlineExceeded):
            await stack.generate(long_running(50, 900), timeout_s=0.3)
        await stack.until_rest()
        await stack.pods.assert_idle()


async def test_abort_by_id(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack:
        assert not await stack.client.abort("nobody")
        outcome = Outcome()

        async def abort() -> None:
            assert await stack.client.abort(outcome.last.request_id)

        with pytest.raises(Cancelled, match="was aborted"):
            await generate_and(stack, long_running(50, 900), 3, abort, outcome)
        assert all(not r.finish_reason for r in outcome.responses), "no normal end"
