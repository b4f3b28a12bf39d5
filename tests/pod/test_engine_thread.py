"""The engine's thread: order of commands and events, sleep without work, and what a crash does to callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from engine.batch import Batch, TokenEvent
from engine.core import EngineConfig, EngineCore
from engine.fake import FakeRunner, fake_generate
from engine.sequence import SampledToken, SamplingParams, SequenceSpec
from pod import engine_thread
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
        self.on_step: Callable[[], None] = lambda: None  # on the engine's thread
        self.step_times: list[float] = []
        self.thread = EngineThread(core, self._on_events, on_crash=self._on_crash, on_step=self._stepped)

    def _stepped(self, step_s: float) -> None:
        self.step_times.append(step_s)
        self.on_step()

    def _on_events(self, events: list[TokenEvent]) -> None:
        self.events += events
        self.batches.append(len(events))
        self.changed.set()

    def _on_crash(self, error: BaseException) -> None:
        self.crashes.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
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
        await watcher.thread.call(lambda core: add_all(core, both))
        await watcher.until(lambda: len(watcher.events) == 10)
        assert watcher.batches == [2] * 5
        for sequence in both:
            tokens = [e.token.token_id for e in watcher.events if e.sequence_id == sequence.sequence_id]
            assert tuple(tokens) == fake_generate(sequence.prompt_ids, PARAMS).output_ids


async def test_a_result_comes_after_the_events_of_earlier_steps() -> None:
    async with watched(make_core()) as watcher:
        await watcher.thread.call(lambda core: core.add(spec("a")))
        num_steps = 0
        while num_steps < 5:  # a token a step
            num_steps = await watcher.thread.call(lambda core: len(watcher.step_times))
            assert len(watcher.events) >= num_steps


@pytest.mark.parametrize(("load_s", "num_running"), [(0.0, [0, 1, 1, 1, 1]), (1000.0, [0] * 5)])
async def test_the_load_is_told_now_and_then_and_at_rest(
    monkeypatch: pytest.MonkeyPatch, load_s: float, num_running: list[int]
) -> None:
    """At rest before the last events, so that whoever has seen the last token sees the blocks free."""
    monkeypatch.setattr(engine_thread, "LOAD_S", load_s)
    seen: list[int] = []
    async with watched(make_core()) as watcher:
        watcher.on_step = lambda: seen.append(watcher.thread.load.num_running)
        await watcher.thread.call(lambda core: core.add(spec("a")))
        await watcher.until(lambda: len(watcher.events) == 5)
        load = watcher.thread.load
        assert (load.num_waiting, load.num_running, load.num_free_blocks) == (0, 0, BLOCKS)
    assert seen == num_running


async def test_commands_run_on_one_other_thread_in_order() -> None:
    async with watched(make_core()) as watcher:
        order: list[int] = []
        names: set[str] = set()

        def note(number: int, core: EngineCore) -> None:
            order.append(number)
            names.add(threading.current_thread().name)

        watcher.thread.post(partial(note, 0))
        await asyncio.gather(*(watcher.thread.call(partial(note, n)) for n in range(1, 20)))
        assert order == list(range(20))
        assert names == {"engine"}


async def test_a_command_s_exception_is_its_caller_s() -> None:
    async with watched(make_core()) as watcher:
        with pytest.raises(KeyError):
            await watcher.thread.call(lambda core: core.held("nobody"))
        assert await watcher.thread.call(lambda core: core.abort("nobody")) is False
        assert not watcher.crashes


async def test_an_idle_thread_waits() -> None:
    """Without work no step is taken."""
    core = make_core()
    async with watched(core) as watcher:
        for _ in range(3):
            await watcher.thread.call(lambda core: None)
        assert not core.has_work
        assert watcher.step_times == []


async def test_cancelling_a_caller_leaves_the_engine_alone() -> None:
    async with watched(make_core()) as watcher:
        gate = Gate()
        watcher.thread.post(gate.hold)
        await asyncio.to_thread(gate.entered.wait, 5)
        call = asyncio.create_task(watcher.thread.call(lambda core: core.add(spec("a"))))
        await asyncio.sleep(0)
        call.cancel()
        undo = asyncio.create_task(watcher.thread.call(lambda core: core.abort("a")))
        await asyncio.sleep(0)
        gate.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await undo is True


def add_all(core: EngineCore, specs: list[SequenceSpec]) -> None:
    for s in specs:
        core.add(s)


class Gate:
    """Holds the engine's thread up, between steps."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()

    def hold(self, _core: EngineCore | None = None) -> None:
        self.entered.set()
        self.leave.wait(5)


class BrokenRunner(FakeRunner):
    """Fails in its first batch, once the gate opens."""

    gate = Gate()

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        self.gate.hold()
        raise RuntimeError("out of luck")


async def test_a_crash_fails_pending_and_later_calls() -> None:
    runner = BrokenRunner(np.zeros(BLOCKS * 256, np.uint8), 16)
    async with watched(make_core(runner)) as watcher:
        watcher.thread.post(lambda core: core.add(spec("a")))
        await asyncio.to_thread(runner.gate.entered.wait, 5)
        pending = asyncio.create_task(watcher.thread.call(EngineCore.load))
        await asyncio.sleep(0)
        runner.gate.leave.set()
        for call in (pending, watcher.thread.call(EngineCore.load)):
            with pytest.raises(InternalError, match="out of luck"):
                await call
        assert len(watcher.crashes) == 1
        watcher.thread.post(lambda core: core.abort("a"))  # heard by nobody, and no error


async def test_calls_after_a_stop_fail_at_once() -> None:
    async with watched(make_core()) as watcher:
        pass
    with pytest.raises(InternalError, match="stopped"):
        await watcher.thread.call(EngineCore.load)
