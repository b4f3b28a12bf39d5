"""Watches the pod records in the Redis-protocol registry and keeps the last good view of them.

A registry that is unreachable, or restarted empty, says nothing about the pods: a record stays until its pod has not
beaten for three intervals (at least MIN_EXPIRY_S) while the registry was read. So pods have time to heal an emptied
registry, and requests in flight do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import redis.asyncio
from google.protobuf.message import DecodeError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from proto.registry import EXPIRY_INTERVALS, pod_pattern
from proto.registry_pb2 import PodRecord
from router.snapshot import PodKey, PodView, pod_view

log = logging.getLogger(__name__)

POLL_S = 0.25
TIMEOUT_S = 2.0
MIN_EXPIRY_S = 4 * POLL_S  # one late poll is no verdict on pods that beat faster than it looks


@dataclass(frozen=True, slots=True)
class Sighting:
    """A pod's record, when its last heartbeat was first seen here, and until when that is good (the router's clock)."""

    view: PodView
    heartbeat: int
    seen_at: float
    expires_at: float


@dataclass(slots=True)
class PodTable:
    """The current sightings. Pure: what is read from the registry goes in, with the time."""

    sightings: dict[str, Sighting] = field(default_factory=dict)

    def update(self, records: list[PodRecord], now: float) -> set[str]:
        """Takes all records of one good poll, drops pods that have expired, and returns what is wrong with records."""
        complaints: set[str] = set()
        for record in records:
            try:
                self._see(record, now)
            except ValueError as error:
                complaints.add(str(error))
        for pod_id in [pod_id for pod_id, s in self.sightings.items() if s.expires_at <= now]:
            log.warning("pod %s has stopped beating: gone", pod_id)
            del self.sightings[pod_id]
        return complaints

    def _see(self, record: PodRecord, now: float) -> None:
        known = self.sightings.get(record.pod_id)
        if known is not None and (known.view.epoch, known.heartbeat) == (record.epoch, record.heartbeat):
            return
        if known is None or known.view.epoch != record.epoch:
            log.info("pod %s at %s, epoch %s", record.pod_id, record.address, record.epoch)
        expires_at = now + max(EXPIRY_INTERVALS * record.heartbeat_interval_s, MIN_EXPIRY_S)
        self.sightings[record.pod_id] = Sighting(pod_view(record), record.heartbeat, now, expires_at)

    def outage(self, lasted_s: float) -> None:
        """The registry was not read for so long, so nobody's heartbeat could be seen."""
        for pod_id, sighting in self.sightings.items():
            self.sightings[pod_id] = replace(sighting, expires_at=sighting.expires_at + lasted_s)

    def keys(self) -> set[PodKey]:
        return {sighting.view.key for sighting in self.sightings.values()}


class RegistryWatcher:
    """Polls every POLL_S and calls `on_update()` after each good poll."""

    def __init__(
        self, url: str, cluster: str, on_update: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pods = PodTable()
        self._pattern = pod_pattern(cluster)
        self._on_update = on_update
        self._clock = clock
        self._last_good = clock()
        self._reachable = True
        self._complaints: set[str] = set()  # of the last poll: each is told once, not with every poll
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._client = redis.asyncio.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )

    async def start(self) -> None:
        """Polls once, whether or not the registry answers, and goes on in the background."""
        await self._poll()
        self._task = asyncio.create_task(self._run(), name="registry watcher")

    async def close(self) -> None:
        self._stopping.set()  # no cancellation: the Redis client now and then swallows one
        if self._task is not None:
            await self._task
        await self._client.aclose()

    async def _run(self) -> None:
        while not await self._stops_within(POLL_S):
            await self._poll()

    async def _stops_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _poll(self) -> None:
        try:
            values = await self._read()
        except (redis.RedisError, OSError) as error:
            self._note(reachable=False, detail=str(error))
            return
        now = self._clock()
        gap_s = now - self._last_good
        if gap_s > 2 * POLL_S:  # it did not answer, or this process stood still
            self.pods.outage(gap_s)
        self._last_good = now
        self._note(reachable=True)
        records, complaints = _parse(values)
        self._complain(complaints | self.pods.update(records, now))
        self._on_update()

    async def _read(self) -> list[bytes]:
        keys = [key async for key in self._client.scan_iter(match=self._pattern, count=1000)]
        values = await self._client.mget(keys) if keys else []
        return [value if isinstance(value, bytes) else value.encode() for value in values if value is not None]

    def _complain(self, complaints: set[str]) -> None:
        for complaint in sorted(complaints - self._complaints):
            log.warning("ignoring a record: %s", complaint)
        self._complaints = complaints

    def _note(self, *, reachable: bool, detail: str = "") -> None:
        if reachable and not self._reachable:
            log.warning("the registry is reachable again")
        elif self._reachable and not reachable:
            log.warning("cannot read the registry, keeping the last view of it: %s", detail)
        self._reachable = reachable


def _parse(values: list[bytes]) -> tuple[list[PodRecord], set[str]]:
    """The records, and what is wrong with those that are none."""
    records: list[PodRecord] = []
    complaints: set[str] = set()
    for value in values:
        try:
            records.append(PodRecord.FromString(value))
        except DecodeError:
            complaints.add(f"{len(value)} bytes that are no PodRecord")
    return records, complaints
