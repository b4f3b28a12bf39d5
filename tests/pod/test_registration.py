"""A pod's record: published, renewed, expiring, healed after an outage, removed by its owner only."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
import redis
import redis.asyncio

from pod.errors import StartupError
from pod.registration import STOP_S, Registration
from proto.registry import pod_key
from proto.registry_pb2 import POD_STATE_DRAINING, POD_STATE_READY, PodRecord
from tests.support.polling import until
from tests.support.ports import free_port
from tests.support.registry import RegistryServer

CLUSTER = "registration"
INTERVAL_S = 0.2


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    server = RegistryServer()
    server.start()
    yield server
    server.kill()


def registration(url: str, record: PodRecord, interval_s: float = INTERVAL_S) -> Registration:
    def current() -> PodRecord:
        return PodRecord.FromString(record.SerializeToString())

    return Registration(url, CLUSTER, current, interval_s)


async def read(url: str, pod_id: str) -> PodRecord | None:
    async with redis.asyncio.from_url(url) as client:
        stored = await client.get(pod_key(CLUSTER, pod_id))
        return PodRecord.FromString(stored) if isinstance(stored, bytes) else None


async def until_heartbeat(url: str, pod_id: str, heartbeat: int) -> None:
    async def reached() -> bool:
        record = await read(url, pod_id)
        return record is not None and record.heartbeat >= heartbeat

    await until(reached)


async def test_record_is_published_renewed_and_removed(registry_url: str) -> None:
    record = PodRecord(pod_id="pod-1", epoch="e1", state=POD_STATE_READY)
    ours = registration(registry_url, record)
    await ours.start()
    stored = await read(registry_url, "pod-1")
    assert stored is not None
    assert stored.heartbeat >= 1
    assert (stored.heartbeat_interval_s, stored.epoch) == (INTERVAL_S, "e1")
    await until_heartbeat(registry_url, "pod-1", 3)
    await ours.stop()
    assert await read(registry_url, "pod-1") is None


async def test_record_expires_after_three_intervals(registry_url: str) -> None:
    ours = registration(registry_url, PodRecord(pod_id="pod-2", epoch="e1"))
    await ours.start()
    async with redis.asyncio.from_url(registry_url) as client:
        remaining_ms = await client.pttl(pod_key(CLUSTER, "pod-2"))
    assert 0 < remaining_ms <= 3 * INTERVAL_S * 1000
    await ours.stop(remove=False)

    async def gone() -> bool:
        return await read(registry_url, "pod-2") is None

    await until(gone)


async def test_publish_does_not_wait_for_the_heartbeat(registry_url: str) -> None:
    record = PodRecord(pod_id="pod-3", epoch="e1", state=POD_STATE_READY)
    ours = registration(registry_url, record, interval_s=60)
    await ours.start()
    record.state = POD_STATE_DRAINING
    ours.publish()

    async def published() -> bool:
        stored = await read(registry_url, "pod-3")
        return stored is not None and stored.state == POD_STATE_DRAINING

    await until(published)
    await ours.stop()


async def test_a_newer_incarnation_s_record_is_left_alone(registry_url: str) -> None:
    old = registration(registry_url, PodRecord(pod_id="pod-4", epoch="old"), interval_s=10)
    new = registration(registry_url, PodRecord(pod_id="pod-4", epoch="new"))
    await old.start()
    await new.start()
    await old.stop()
    stored = await read(registry_url, "pod-4")
    assert stored is not None
    assert stored.epoch == "new"
    await new.stop()


async def test_survives_an_outage_and_an_emptied_registry(server: RegistryServer) -> None:
    ours = registration(server.url, PodRecord(pod_id="pod-5", epoch="e1"))
    await ours.start()
    server.kill()
    await asyncio.sleep(3 * INTERVAL_S)  # heartbeats fail, which is not an error
    await asyncio.to_thread(server.start)
    await until_heartbeat(server.url, "pod-5", 2)
    await ours.stop()


async def test_stop_without_a_registry(server: RegistryServer) -> None:
    ours = registration(server.url, PodRecord(pod_id="pod-6"))
    await ours.start()
    server.kill()
    await ours.stop()


@pytest.mark.parametrize("writing", [False, True], ids=["at rest", "during a heartbeat"])
async def test_stop_does_not_wait_for_a_registry_that_does_not_answer(
    server: RegistryServer, writing: bool, no_leaked_tasks: None
) -> None:
    ours = registration(server.url, PodRecord(pod_id="pod-8"), interval_s=0.01 if writing else 60)
    await ours.start()
    server.send(signal.SIGSTOP)
    await asyncio.sleep(0.1)
    started_at = time.monotonic()
    await ours.stop()
    assert time.monotonic() - started_at < STOP_S + 10


async def test_an_unreachable_registry_is_one_line() -> None:
    ours = registration(f"redis://127.0.0.1:{free_port()}/0", PodRecord(pod_id="pod-7"))
    with pytest.raises(StartupError, match=r"cannot reach the registry at redis://.*--registry-url"):
        await ours.start()
    await ours.stop()
