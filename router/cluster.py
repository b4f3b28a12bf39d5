"""The router's picture of its pods, and the one place where work is placed on them.

Joins what the registry says (`RegistryWatcher`), whether pods answer (`PodClient`), what this router has in flight
(`Placements`) and what it has sent where (`PrefixIndex`) into snapshots for the policy. A decision and the count of its
work are one step without an await, so two requests never see the same room. Requests that find none wait in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from proto import common_pb2
from proto.errors import PdserveError, from_info
from router.background import Background
from router.failures import PodLost
from router.model import ServedModel
from router.placements import Placements
from router.pod_client import CALL_S, DecodeClient, PodClient, PrefillClient
from router.policy import Refusal, RoutingDecision, RoutingRequest, decide, why_not_serving
from router.prefix_index import PrefixIndex
from router.registry import POLL_S, RegistryWatcher, Sighting
from router.snapshot import DECODE, Correction, PodKey, PodView, Snapshot
from router.standstill import Standstill
from router.wait_queue import QueueFull, WaitQueue

QUEUE_RETRY_MS = 1000
TIMER_MARGIN_S = 0.002  # a timer may be early by a clock's tick
CLOSE_S = 2.0  # how long pods may take to answer what they are told at the end


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision whose work is counted on its pods under `owner`, and the clients to talk to them."""

    owner: str
    decision: RoutingDecision
    prefill: PrefillClient | None
    decode: DecodeClient


class Cluster:
    """Owned by the router's event loop; `await start()` on it, `await close()` at the end."""

    def __init__(
        self,
        *,
        registry_url: str,
        cluster: str,
        router_id: str,
        max_waiting: int,
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.background = Background()  # what pods are being told
        self._retiring = Background()
        self.prefixes = PrefixIndex()
        self._router_id = router_id
        self._rng = rng
        self._clock = clock
        self._placements = Placements()
        self._standstill = Standstill(clock)
        self._clients: dict[PodKey, PodClient] = {}
        self._retired: dict[PodKey, PodClient] = {}  # for a while, see _retire
        self._numbers = itertools.count(1)  # of connections: each has a router id of its own
        self._closing = asyncio.Event()
        self._watcher = RegistryWatcher(registry_url, cluster, self._updated, clock)
        self._queue: WaitQueue[Placement] = WaitQueue(max_waiting, self._undo)
        self.on_change: Callable[[], None] = lambda: None  # pods came, went or changed

    async def start(self) -> None:
        self._standstill.start()
        await self._watcher.start()

    async def close(self) -> None:
        """Requests must have ended."""
        await self._watcher.close()
        self._standstill.stop()
        self._closing.set()
        await self.background.close(CLOSE_S)
        await self._retiring.close(CLOSE_S)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    # What there is.

    def snapshot(self) -> Snapshot:
        sightings = sorted(self._watcher.pods.sightings.items())
        return Snapshot(tuple(self._view(sighting) for _, sighting in sightings))

    def _view(self, sighting: Sighting) -> PodView:
        pod = sighting.view
        client = self._clients.get(pod.key)
        correction = self._placements.correction(pod.key, since=sighting.seen_at - POLL_S)
        return pod.corrected(correction, reachable=client is not None and client.reachable)

    def max_model_len(self, model: ServedModel) -> int:
        """The longest sequence that some decode pod holds; what config.json states while there is no pod.

        Rotary scaling may stretch or bound that length, which pods know.
        """
        views = (sighting.view for sighting in self._watcher.pods.sightings.values())
        lengths = (pod.max_model_len for pod in views if pod.role == DECODE and pod.model_id == model.model_id)
        return max(lengths, default=model.max_model_len)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    # Placing work.

    async def place(
        self,
        owner: str,
        request: Callable[[], RoutingRequest],
        *,
        priority: int,
        arrived_at: float,
        waiting_since: float,
        wait_s: float,
    ) -> Placement:
        """Decides and counts the work under `owner`, now or when it is this request's turn within `wait_s`.

        `waiting_since`: when it began to wait, with all tries before this one. `request` is asked anew for each try.
        Raises Overloaded with a retry delay, or what the policy refuses with.
        """
        tries = _Tries(self, owner, request)
        asked = request()
        is_picky = bool(asked.excluded) or asked.computes is not None
        try:
            return await self._queue.place(
                tries.next, priority=priority, arrived_at=arrived_at, is_picky=is_picky, wait_s=wait_s
            )
        except TimeoutError:
            raise tries.error(f"waited {self._clock() - waiting_since:.1f} s: ") from None
        except QueueFull:
            raise tries.error(f"{self.num_waiting} requests are waiting: ") from None

    def pump_in(self, seconds: float) -> None:
        """Gives waiters a try then: for some of them a pod is out of bounds until that time, and nothing else tells."""
        asyncio.get_running_loop().call_later(seconds + TIMER_MARGIN_S, self._queue.pump)

    def decide(self, request: RoutingRequest) -> RoutingDecision | Refusal:
        return decide(request, self.snapshot(), self.prefixes, self._rng, self._clock())

    def count(self, owner: str, request: RoutingRequest, decision: RoutingDecision) -> Placement:
        """Counts the decision's work on its pods until `free_prefill` and `free_decode`."""
        now, decode, prefill = self._clock(), decision.decode_pod, decision.prefill_pod
        num_tokens = request.num_tokens - decision.predicted_cached_tokens
        num_blocks = decode.blocks_for(request.num_kv_tokens)
        decode_client = self._clients[decode.key]
        assert isinstance(decode_client, DecodeClient), f"{decode.pod_id} is no decode pod"
        if prefill is None:
            self._placements.place(decode.key, owner, Correction(1, num_tokens, num_blocks), now)
            self.prefixes.record(*decode.key, request.prefix_hashes)
            return Placement(owner, decision, None, decode_client)
        prefill_client = self._clients[prefill.key]
        assert isinstance(prefill_client, PrefillClient), f"{prefill.pod_id} is no prefill pod"
        self._placements.place(decode.key, owner, Correction(1, 0, num_blocks), now)
        self._placements.place(prefill.key, owner, Correction(1, num_tokens, 0), now)
        self.prefixes.record(*prefill.key, request.prefix_hashes)
        return Placement(owner, decision, prefill_client, decode_client)

    def free_prefill(self, placement: Placement) -> None:
        if placement.prefill is not None:
            self._placements.remove(placement.prefill.pod.key, placement.owner, self._clock())
            self._queue.pump()

    def free_decode(self, placement: Placement) -> None:
        self._placements.remove(placement.decode.pod.key, placement.owner, self._clock())
        self._queue.pump()

    def _undo(self, placement: Placement) -> None:
        """Its request went away in the moment in which it was placed."""
        self.free_prefill(placement)
        self.free_decode(placement)

    # What changes.

    def _updated(self) -> None:
        """After each good poll of the registry: one client for each incarnation of each pod."""
        sightings = self._watcher.pods.sightings.values()
        for sighting in sightings:
            key = sighting.view.key
            if key not in self._clients:
                self._clients[key] = self._retired.pop(key) if key in self._retired else self._connect(sighting.view)
            self._clients[key].heard(sighting.seen_at - POLL_S)
        live = {sighting.view.key for sighting in sightings}
        for key in [key for key in self._clients if key not in live]:
            self.prefixes.forget(key[0], key[1])
            self._retire(key)
        self._placements.forget(live)
        self._changed()

    def _retire(self, key: PodKey) -> None:
        """Fails the calls under way. If the pod lives after all, it still hears what it can free, or is taken back."""
        client = self._retired[key] = self._clients.pop(key)
        client.lose(PodLost(f"pod {key[0]}: it has stopped beating", pod_id=key[0]))
        self._retiring.spawn(self._close_later(key, client), f"close {key[0]}")

    async def _close_later(self, key: PodKey, client: PodClient) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_S):
                    await self._closing.wait()
        finally:
            if self._retired.get(key) is client:
                del self._retired[key]
                await client.close()

    def _connect(self, pod: PodView) -> PodClient:
        clock, stood_still = self._clock, self._standstill.is_recent
        if pod.role == DECODE:
            router_id = f"{self._router_id}-{next(self._numbers)}"
            return DecodeClient(pod, clock, stood_still, router_id, self._changed)
        return PrefillClient(pod, clock, stood_still)

    def _changed(self) -> None:
        self._queue.pump()
        self.on_change()

    def why_not_serving(self, model: ServedModel) -> str | None:
        """Why no pods could serve a request for `model` now; None when some could."""
        return why_not_serving(model.model_id, self.snapshot())

    def check_invariants(self, live_owners: set[str]) -> None:
        """Raises AssertionError naming what is held for a request that is gone."""
        self._placements.check_invariants(live_owners)
        self.prefixes.check_invariants()
        for client in self._clients.values():
            if isinstance(client, DecodeClient):
                client.tokens.check_invariants(live_owners)
        if not live_owners:
            calls = [call for client in self._clients.values() for call in client.calls]
            assert len(calls) <= len(self.background), f"{len(calls)} calls to pods without a request"
            assert self.num_waiting == 0, f"{self.num_waiting} waiters without a request"


class _Tries:
    """One request's tries to be placed; remembers why the last one failed."""

    def __init__(self, cluster: Cluster, owner: str, request: Callable[[], RoutingRequest]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._request = request
        self._refusal: Refusal | None = None

    def next(self) -> Placement | None:
        """None: there is no room now. Raises the policy's error when waiting cannot help."""
        request = self._request()
        outcome = self._cluster.decide(request)
        if isinstance(outcome, RoutingDecision):
            return self._cluster.count(self._owner, request, outcome)
        self._refusal = outcome
        if not outcome.can_wait:
            raise self.error("")
        return None

    def error(self, prefix: str) -> PdserveError:
        """The last refusal as what the client is told; whoever gave up behind others in the queue has none."""
        refusal = self._refusal or Refusal(common_pb2.ERROR_KIND_OVERLOADED, "others are first", True, QUEUE_RETRY_MS)
        info = common_pb2.ErrorInfo(
            kind=refusal.kind, message=prefix + refusal.message, retry_after_ms=refusal.retry_after_ms
        )
        return from_info(info)
