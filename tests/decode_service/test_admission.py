"""The queue for blocks, over a real engine: order, timeout, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from decode_service.admission import BlockQueue
from engine.core import EngineConfig, EngineCore
from engine.fake import FakeRunner
from engine.sequence import SamplingParams, SequenceSpec
from pod.engine_thread import EngineThread

BLOCKS = 4


@pytest.fixture
async def engine() -> AsyncIterator[EngineThread]:
    core = EngineCore(FakeRunner(np.zeros(BLOCKS * 256, np.uint8), 16), EngineConfig(num_blocks=BLOCKS))
    thread = EngineThread(core, lambda events: None, on_crash=lambda error: None)
    thread.start()
    yield thread
    await thread.stop()


def spec(name: str, num_tokens: int = 40) -> SequenceSpec:
    params = SamplingParams(temperature=0, max_tokens=8)
    return SequenceSpec(sequence_id=name, prompt_ids=(ord(name),) * num_tokens, params=params)


async def free(engine: EngineThread, queue: BlockQueue, name: str) -> None:
    assert await engine.call(lambda core: core.abort(name))
    queue.notify()


async def test_blocks_at_once_even_without_patience(engine: EngineThread) -> None:
    reservation = await BlockQueue(engine).reserve(spec("a"), wait_s=0)
    assert len(reservation.block_ids) >= 3


async def test_no_blocks_in_time(engine: EngineThread) -> None:
    queue = BlockQueue(engine)
    await queue.reserve(spec("a"), wait_s=0)
    for wait_s in (0, 0.01):
        with pytest.raises(TimeoutError):
            await queue.reserve(spec("b"), wait_s=wait_s)
    assert queue.num_waiting == 0
    await free(engine, queue, "a")
    await queue.reserve(spec("c"), wait_s=0)


async def test_what_can_never_fit_is_refused_at_once(engine: EngineThread) -> None:
    with pytest.raises(ValueError, match="slots"):
        await BlockQueue(engine).reserve(spec("a", num_tokens=100), wait_s=5)


async def test_first_come_first_served(engine: EngineThread) -> None:
    """A small request behind a big one waits, though it would fit."""
    queue = BlockQueue(engine)
    await queue.reserve(spec("a"), wait_s=0)
    order: list[str] = []

    async def wait(name: str, num_tokens: int) -> None:
        await queue.reserve(spec(name, num_tokens), wait_s=5)
        order.append(name)

    big = asyncio.create_task(wait("b", 40))
    await asyncio.sleep(0)
    small = asyncio.create_task(wait("c", 8))
    await engine.call(lambda core: None)
    await asyncio.sleep(0)
    assert order == []
    await free(engine, queue, "a")
    await asyncio.wait([big])
    assert order == ["b"]
    await free(engine, queue, "b")
    await asyncio.wait([small])
    assert order == ["b", "c"]


async def test_cancelled_waiters_vanish(engine: EngineThread) -> None:
    queue = BlockQueue(engine)
    await queue.reserve(spec("a"), wait_s=0)
    waiters = [asyncio.create_task(queue.reserve(spec(name), wait_s=5)) for name in "bcd"]
    await engine.call(lambda core: None)
    for waiter in waiters[:2]:
        waiter.cancel()
    await asyncio.wait(waiters[:2])
    assert queue.num_waiting == 1
    await free(engine, queue, "a")
    assert (await waiters[2]).sequence_id == "d"
