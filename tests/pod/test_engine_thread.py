"""The engine's thread: order of commands and events, sleep without work, and what a crash does to callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from engine.batch import Batch, SampledToken, TokenEvent
from engine.core import EngineConfig, EngineCore
from engine.fake import FakeRunner, fake_generate
from engine.sequence import SamplingParams, SequenceSpec
from pod.engine_thread import EngineThread
from proto.errors import InternalError

BLOCKS = 32
PARAMS = SamplingParams(temperature=0.0, max_tokens=5)


def make_core(runner: FakeRunner | None = None) -> EngineCore:
    memory = np.zeros(BLOCKS * 16 * 16, np.uint8)
    return EngineCore(runner or FakeRunner(memory, 16), EngineConfig(num_blocks=BLOCKS))


class Watched:
    """A running EngineThread, and what it told the loop."""

    def __init__(self, core: EngineCore) -> None:
        self.events: list[TokenEvent] = []
        self.batches: list[int] = []
        self.crashes: list[BaseException] = []
        self.changed = asyncio.Event()
        self.thread = EngineThread(core, self._on_events, on_crash=self._on_crash)

    def _on_events(self, events: list[TokenEvent]) -> None:
        self.events += events
        self.batches.append(len(events))
        self.changed.set()

    def _on_crash(self, error: BaseException) -> None:
        self.crashes.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def watched(core: EngineCore) -> AsyncIterator[Watched]:
    watcher = Watched(core)
    watcher.thread.start()
    try:
        yield watcher
    finally:
        await watcher.thread.stop()


def spec(name: str, prompt: tuple[int, ...] = (65, 66)) -> SequenceSpec:
    return SequenceSpec(sequence_id=name, prompt_ids=prompt, params=PARAMS)


async def test_answers_arrive_as_one_call_a_step() -> None:
    async with watched(make_core()) as watcher:
        both = [spec("a"), spec("b", (1, 2, 3))]
        await watcher.thread.call(lambda core: [core.add(s) for s in both])
        await watcher.until(lambda: len(watcher.events) == 10)
        assert watcher.batches == [2] * 5
        for sequence in both:
            tokens = [e.token.token_id for e in watcher.events if e.sequence_id == sequence.sequence_id]
            assert tuple(tokens) == fake_generate(sequence.prompt_ids, PARAMS).output_ids


async def test_a_result_comes_after_the_events_of_earlier_steps() -> None:
    async with watched(make_core()) as watcher:
        await watcher.thread.call(lambda core: core.add(spec("a")))
        while (load := await watcher.thread.call(EngineCore.load)).num_running:
            seen = len(watcher.events)
            assert load.num_free_blocks < load.num_blocks
        assert len(watcher.events) == 5 >= seen


async def test_commands_run_on_one_other_thread_in_order() -> None:
    async with watched(make_core()) as watcher:
        order: list[int] = []
        names: set[str] = set()

        def command(number: int) -> Callable[[EngineCore], None]:
            return lambda core: (order.append(number), names.add(threading.current_thread().name))[0]

        watcher.thread.post(command(0))
        await asyncio.gather(*(watcher.thread.call(command(n)) for n in range(1, 20)))
        assert order == list(range(20))
        assert names == {"engine"}


async def test_a_command_s_exception_is_its_caller_s() -> None:
    async with watched(make_core()) as watcher:
        with pytest.raises(KeyError):
            await watcher.thread.call(lambda core: core.held("nobody"))
        assert await watcher.thread.call(lambda core: core.abort("nobody")) is False
        assert not watcher.crashes


async def test_an_idle_thread_waits() -> None:
    """Without work no step is taken: the runner is never called, and the thread is blocked on its condition."""
    steps: list[float] = []
    thread = EngineThread(make_core(), lambda events: None, on_crash=lambda error: None, on_step=steps.append)
    thread.start()
    try:
        await thread.call(lambda core: None)
        await thread.call(lambda core: None)
        assert steps == []
    finally:
        await thread.stop()


async def test_cancelling_a_caller_leaves_the_engine_alone() -> None:
    async with watched(make_core()) as watcher:
        entered, leave = threading.Event(), threading.Event()
        watcher.thread.post(lambda core: (entered.set(), leave.wait(5)))
        await asyncio.to_thread(entered.wait, 5)
        call = asyncio.create_task(watcher.thread.call(lambda core: core.add(spec("a"))))
        await asyncio.sleep(0)
        call.cancel()
        undo = asyncio.create_task(watcher.thread.call(lambda core: core.abort("a")))
        await asyncio.sleep(0)
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await undo is True


class BrokenRunner(FakeRunner):
    def execute(self, batch: Batch) -> list[SampledToken | None]:
        raise RuntimeError("out of luck")


async def test_a_crash_fails_pending_and_later_calls() -> None:
    core = make_core(BrokenRunner(np.zeros(BLOCKS * 256, np.uint8), 16))
    async with watched(core) as watcher:
        entered, leave = threading.Event(), threading.Event()
        watcher.thread.post(lambda core: (entered.set(), leave.wait(5), core.add(spec("a"))))
        await asyncio.to_thread(entered.wait, 5)
        leave.set()
        await watcher.until(lambda: bool(watcher.crashes))
        assert "out of luck" in str(watcher.crashes[0])
        with pytest.raises(InternalError, match="out of luck"):
            await watcher.thread.call(EngineCore.load)
        watcher.thread.post(lambda core: core.abort("a"))  # heard by nobody, and no error


async def test_calls_after_a_stop_fail_at_once() -> None:
    async with watched(make_core()) as watcher:
        pass
    with pytest.raises(InternalError, match="stopped"):
        await watcher.thread.call(EngineCore.load)
