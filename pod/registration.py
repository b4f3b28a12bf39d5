"""The pod's record in the registry: written whole by every heartbeat, so an emptied registry heals itself.

A registry that cannot be reached is reported once and tried again at every heartbeat; the pod goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pod.errors import StartupError
from proto.registry import EXPIRY_INTERVALS, pod_key
from proto.registry_pb2 import PodRecord

log = logging.getLogger(__name__)

CONNECT_S = 2.0
STOP_S = 1.0  # for which a stopping pod waits for the registry: it may be stopping too, or out of reach


class Registration:
    """`record()` is asked for the current record at each heartbeat; this fills in its count and interval."""

    def __init__(self, url: str, cluster: str, record: Callable[[], PodRecord], interval_s: float) -> None:
        self._url = url
        self._cluster = cluster
        self._record = record
        self._interval_s = interval_s
        self._heartbeats = 0
        self._reachable = True
        self._due = asyncio.Event()  # something to do before the next heartbeat
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._client = redis.asyncio.from_url(
            url, socket_timeout=CONNECT_S, socket_connect_timeout=CONNECT_S, retry=Retry(NoBackoff(), 0)
        )

    async def start(self) -> None:
        """Publishes the pod and begins the heartbeat. Raises StartupError when the registry cannot be reached."""
        try:
            await self._write()
        except (redis.RedisError, OSError) as error:
            raise StartupError(
                f"cannot reach the registry at {self._url}: {error}; start it or set --registry-url"
            ) from None
        self._task = asyncio.create_task(self._beat(), name="heartbeat")

    def publish(self) -> None:
        """Has the record written now: a change of state should not wait for the next heartbeat, nor its pod for us."""
        self._due.set()

    async def stop(self, *, remove: bool = True) -> None:
        """Ends the heartbeat and removes the record, unless a newer incarnation of this pod has written its own.

        Gives up on a registry that does not answer within STOP_S: there the record expires.
        """
        self._stopping = True
        self._due.set()
        ending = asyncio.create_task(self._end(remove), name="deregister")
        await asyncio.wait([ending], timeout=STOP_S)
        ending.cancel()
        await self._client.aclose()  # what is under way fails, also where it did not heed the cancellation
        await asyncio.wait([ending])

    async def _end(self, remove: bool) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        await task
        if remove:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._remove()

    async def _beat(self) -> None:
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()
            self._due.clear()
            if not self._stopping:
                await self._try_to_write()

    async def _try_to_write(self) -> None:
        try:
            await self._write()
        except (redis.RedisError, OSError) as error:
            self._note(reachable=False, detail=str(error))
        else:
            self._note(reachable=True)

    async def _write(self) -> None:
        self._heartbeats += 1
        record = self._record()
        record.heartbeat = self._heartbeats
        record.heartbeat_interval_s = self._interval_s
        expiry_ms = round(EXPIRY_INTERVALS * self._interval_s * 1000)
        await self._client.set(self._key(record), record.SerializeToString(), px=expiry_ms)

    async def _remove(self) -> None:
        ours = self._record()
        stored = await self._client.get(self._key(ours))
        if isinstance(stored, bytes) and PodRecord.FromString(stored).epoch == ours.epoch:
            await self._client.delete(self._key(ours))

    def _key(self, record: PodRecord) -> str:
        return pod_key(self._cluster, record.pod_id)

    def _note(self, *, reachable: bool, detail: str = "") -> None:
        if reachable and not self._reachable:
            log.warning("the registry is reachable again")
        elif self._reachable and not reachable:
            log.warning("cannot reach the registry at %s, trying on: %s", self._url, detail)
        self._reachable = reachable
