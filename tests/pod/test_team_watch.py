"""A rank that dies is noticed although the engine, which waits for it, never comes back."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator

import pytest

from engine.batch import Batch
from engine.core import EngineConfig, EngineCore
from engine.fake import FAKE_MODEL
from engine.sequence import SampledToken, SequenceSpec
from engine.tensor_parallel.errors import RankLost
from pod import engine_thread, team_watch
from pod.engine_thread import EngineThread
from pod.team_watch import TeamWatch
from proto.errors import InternalError
from tests.support.polling import until


class HangingRunner:
    """Computes nothing until `released`."""

    model = FAKE_MODEL

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        self.entered.set()
        self.released.wait()
        return [(SampledToken(1),) for _ in batch.sequences]


class OneProcess:
    """What a TeamWatch needs of a Team."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(("sleep", "600"))
        self.pids = (self.process.pid,)

    def lost(self) -> RankLost:
        return RankLost("rank 1 was killed")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def team() -> Iterator[OneProcess]:
    team = OneProcess()
    yield team
    team.close()


async def test_an_engine_that_hangs_is_given_up(team: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_watch, "PATIENCE_S", 0.01)
    monkeypatch.setattr(engine_thread, "HUNG_S", 0.01)
    runner, crashes = HangingRunner(), list[BaseException]()
    core = EngineCore(runner, EngineConfig(num_blocks=8))
    engine = EngineThread(core, lambda _: None, on_crash=crashes.append)
    watch = TeamWatch(team, engine)  # type: ignore[arg-type]  # all of it that is used
    engine.start()
    watch.start()
    await engine.call(lambda core: core.add(SequenceSpec(sequence_id="s", prompt_ids=(1,))))
    await asyncio.to_thread(runner.entered.wait)
    waiting = asyncio.create_task(engine.call(lambda core: core.load()))
    await asyncio.sleep(0)
    team.process.kill()
    with pytest.raises(InternalError, match="the engine crashed: rank 1 was killed"):
        await waiting
    assert [str(crash) for crash in crashes] == ["rank 1 was killed"]
    watch.stop()
    await engine.stop()
    runner.released.set()
    await until(lambda: not engine._thread.is_alive())
    await asyncio.sleep(0)  # what the engine says at last
    assert len(crashes) == 1
