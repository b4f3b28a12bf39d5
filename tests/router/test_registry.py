"""The view of the registry outlives the registry, and no pod outlives its heartbeat."""

from __future__ import annotations

import pytest
import redis.asyncio

from proto import registry_pb2
from proto.registry import pod_key
from router.registry import PodTable, RegistryWatcher
from router.snapshot import DECODE
from tests.router.support import until
from tests.router.test_policy import record


def beat(number: int, epoch: str = "e1") -> registry_pb2.PodRecord:
    pod = record("d", DECODE)
    pod.heartbeat, pod.heartbeat_interval_s, pod.epoch = number, 1.0, epoch
    return pod


def test_a_record_lives_three_intervals_past_its_last_heartbeat() -> None:
    table = PodTable()
    table.update([beat(1)], now=10.0)
    table.update([beat(1)], now=12.9)
    assert table.sightings["d"].seen_at == 10.0, "the same heartbeat is no news"
    table.update([beat(2)], now=13.0)
    table.update([], now=15.9)
    assert "d" in table.sightings, "an emptied registry says nothing about the pods"
    table.update([], now=16.0)
    assert table.sightings == {}


def test_a_hung_pod_whose_record_has_not_expired_is_dropped_too() -> None:
    table = PodTable()
    for now in (10.0, 11.0, 12.0, 13.0):
        table.update([beat(1)], now)
    assert table.sightings == {}


def test_an_outage_of_the_registry_does_not_count() -> None:
    table = PodTable()
    table.update([beat(1)], now=10.0)
    table.outage(lasted_s=100.0)
    table.update([], now=112.9)
    assert "d" in table.sightings
    table.update([], now=113.0)
    assert table.sightings == {}


def test_a_pod_that_beats_faster_than_the_router_looks_is_not_dropped_for_one_late_poll() -> None:
    fast, table = beat(1), PodTable()
    fast.heartbeat_interval_s = 0.1
    table.update([fast], now=10.0)
    table.update([], now=10.9)
    assert "d" in table.sightings
    table.update([], now=11.0)
    assert table.sightings == {}


def test_a_new_epoch_replaces_the_old_one() -> None:
    table = PodTable()
    table.update([beat(7)], now=1.0)
    table.update([beat(1, epoch="e2")], now=2.0)
    assert table.keys() == {("d", "e2")}


def test_an_impossible_record_is_ignored() -> None:
    table = PodTable()
    (complaint,) = table.update([registry_pb2.PodRecord(pod_id="odd")], now=1.0)
    assert table.sightings == {}
    assert "pod 'odd': role 0" in complaint


async def test_it_reads_its_own_cluster_only(registry_url: str, caplog: pytest.LogCaptureFixture) -> None:
    updates: list[None] = []
    async with redis.asyncio.from_url(registry_url) as client:
        await client.set(pod_key("mine", "d"), beat(1).SerializeToString(), px=5000)
        await client.set(pod_key("mine", "junk"), b"\xff\xff\xff", px=5000)
        await client.set(pod_key("other", "x"), beat(1).SerializeToString(), px=5000)
        watcher = RegistryWatcher(registry_url, "mine", lambda: updates.append(None))
        await watcher.start()
        assert watcher.pods.keys() == {("d", "e1")}
        await client.set(pod_key("mine", "d"), beat(2).SerializeToString(), px=5000)
        await until(lambda: watcher.pods.sightings["d"].heartbeat == 2)
        await watcher.close()
    assert len(updates) >= 2
    assert caplog.text.count("3 bytes that are no PodRecord") == 1, "however often it was read"


async def test_it_starts_without_a_registry() -> None:
    watcher = RegistryWatcher("redis://127.0.0.1:1/0", "c", lambda: None)
    await watcher.start()
    assert watcher.pods.keys() == set()
    await watcher.close()
