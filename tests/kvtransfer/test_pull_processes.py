"""Pulls from a prefill pod in another OS process that is killed, stopped, continued and restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.puller import Puller
from proto import kv_pb2
from proto.errors import LeaseExpired, PeerLost
from tests.kvtransfer.pods import LAYOUT, NUM_BLOCKS, make_handoff
from tests.kvtransfer.support import Child

RELEASED = [int(kv_pb2.LeaseNotification.ACTION_RELEASE), "lease"]


class Prefill(Child):
    def __init__(self, runtime_dir: Path, epoch: str) -> None:
        super().__init__("tests.kvtransfer.pod_process", str(runtime_dir), epoch)
        self.description = kv_pb2.GetAgentMetadataResponse.FromString(bytes.fromhex(self.ask("describe")))

    async def notes(self, count: int) -> list[list[int | str]]:
        """The next `count` notifications that it gets, (action, lease id) each."""
        notes: list[list[int | str]] = await asyncio.to_thread(self.ask, "notes", count)
        return notes


class Decode:
    """`description` is what the side channel says, as if the pods' gRPC servers were always there."""

    def __init__(self, runtime_dir: Path, description: kv_pb2.GetAgentMetadataResponse) -> None:
        self.endpoint = KVEndpoint(LAYOUT, NUM_BLOCKS, pod_id="decode", epoch="e9", runtime_dir=runtime_dir)
        self.description = description
        self.puller = Puller(self.endpoint, self.fetch)

    async def fetch(self, address: str) -> kv_pb2.GetAgentMetadataResponse:
        return self.description

    async def pull(self, source: int, local: int, epoch: str = "e1") -> int:
        """What the local block holds afterwards."""
        await self.puller.pull(make_handoff([source], 4, epoch=epoch), [local], 0)
        values = set(self.endpoint.kv_memory.reshape(NUM_BLOCKS, -1)[local].tolist())
        assert len(values) == 1
        return int(values.pop()) - 1


@pytest.fixture
def prefill(runtime_dir: Path) -> Iterator[Prefill]:
    process = Prefill(runtime_dir, "e1")
    yield process
    process.kill()


@pytest.fixture
async def decode(runtime_dir: Path, prefill: Prefill, no_leaked_tasks: None) -> AsyncIterator[Decode]:
    decode = Decode(runtime_dir, prefill.description)
    yield decode
    await decode.puller.close()
    decode.puller.check_invariants()
    decode.endpoint.close()


async def test_pull_and_release(prefill: Prefill, decode: Decode) -> None:
    assert await decode.pull(7, 5) == 7
    assert await prefill.notes(1) == [RELEASED]
    prefill.ask("reuse", 8)
    with pytest.raises(LeaseExpired, match="block 8"):
        await decode.pull(8, 6)


async def test_12_killed_before_and_after_the_first_contact(prefill: Prefill, decode: Decode) -> None:
    assert await decode.pull(7, 5) == 7
    prefill.kill()
    for _ in range(2):
        with pytest.raises(PeerLost) as error:
            await decode.pull(8, 6)
        assert error.value.pod_id == "prefill"


async def test_9_14_stopped_before_the_first_contact(prefill: Prefill, decode: Decode) -> None:
    """It is given up in time; when it comes back it can be used again, and hears nothing of the pull it missed."""
    started_at = time.monotonic()
    with prefill.stopped():
        decode.endpoint.agent.backends["shm"]._timeout_s = 0.3  # type: ignore[attr-defined]  # so as not to wait 5 s
        with pytest.raises(PeerLost, match="does not answer"):
            await decode.pull(7, 5)
    assert time.monotonic() - started_at < 5
    assert await decode.pull(7, 5) == 7
    assert await prefill.notes(1) == [RELEASED]


async def test_14_stopped_after_the_first_contact(prefill: Prefill, decode: Decode) -> None:
    """Its memory can be read without it; the release waits for it."""
    assert await decode.pull(7, 5) == 7
    with prefill.stopped():
        assert await decode.pull(8, 6) == 8
    assert await prefill.notes(2) == [RELEASED, RELEASED]


async def test_13_restarted(prefill: Prefill, decode: Decode, runtime_dir: Path) -> None:
    assert await decode.pull(7, 5) == 7
    prefill.kill()
    again = Prefill(runtime_dir, "e2")
    try:
        decode.description = again.description
        with pytest.raises(PeerLost):
            await decode.pull(8, 6)  # over the dead link
        with pytest.raises(LeaseExpired, match="epoch 'e1' is gone"):
            await decode.pull(8, 6)
        assert await decode.pull(8, 6, "e2") == 8
        assert await again.notes(1) == [RELEASED]
    finally:
        again.kill()
