"""A prefill pod's part of a request: compute the prompt, sample the first token, pin the blocks, hand them off.

A Prefill call that ends in any way but a hand-off frees everything. A hand-off's blocks stay pinned under a lease until
the decode pod's RELEASE arrives through the transfer layer, ReleaseLease is called, or nobody renewed the lease.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from engine.batch import EngineLoad, HeldBlocks, TokenEvent
from engine.sequence import FinishReason, SequenceSpec
from pod.messages import FINISH_REASONS, describe_token, not_finite
from pod.role import Owed, PodContext
from pod.rpc import Context, rpc
from pod.spec import cannot_run, check_duration_ms, parse_spec
from pod.ticker import Ticker
from prefill_service.table import Entry, PrefillTable
from proto import kv_pb2, pods_pb2, pods_pb2_grpc, registry_pb2
from proto.errors import Cancelled, PdserveError, PodUnavailable

log = logging.getLogger(__name__)

MAX_LEASE_MS = 10 * 60 * 1000
POLL_S = 0.005  # how long a released block may stay pinned
SERVICE_NAME = pods_pb2.DESCRIPTOR.services_by_name["PrefillPod"].full_name


class PrefillService(pods_pb2_grpc.PrefillPodServicer):
    role = registry_pb2.ROLE_PREFILL
    service_names = (SERVICE_NAME,)

    def __init__(self, pod: PodContext) -> None:
        self._pod = pod
        self.table = PrefillTable()
        self._leases = Ticker(self._tend_leases, interval_s=POLL_S)
        self._draining = False

    # Calls.

    @rpc
    async def Prefill(self, request: pods_pb2.PrefillRequest, context: Context) -> pods_pb2.PrefillResponse:
        check_duration_ms("lease_ms", request.lease_ms, MAX_LEASE_MS)
        spec = parse_spec(request.sequence, self._pod.plan.model)
        if self._draining:
            raise PodUnavailable("this pod is draining", pod_id=self._pod.plan.pod_id)
        future: asyncio.Future[TokenEvent] = asyncio.get_running_loop().create_future()
        entry = self.table.add(spec.sequence_id, future, request.lease_ms / 1000)
        try:
            return await self._prefill(spec, entry)
        finally:
            if not entry.leased:
                self._free(entry)

    @rpc
    async def ReleaseLease(
        self, request: pods_pb2.ReleaseLeaseRequest, context: Context
    ) -> pods_pb2.ReleaseLeaseResponse:
        released = request.epoch in {"", self._pod.plan.epoch} and self._release(request.lease_id)
        return pods_pb2.ReleaseLeaseResponse(released=released)

    async def _prefill(self, spec: SequenceSpec, entry: Entry) -> pods_pb2.PrefillResponse:
        try:
            await self._pod.engine.call(lambda core: core.add(spec, hold=True))
        except ValueError as error:
            raise cannot_run(spec, error) from None
        event = await entry.first_token
        response = pods_pb2.PrefillResponse(
            finish_reason=FINISH_REASONS[event.finish_reason],
            num_cached_tokens=event.num_cached,
            queue_s=event.first_scheduled_at - event.arrived_at,
            compute_s=event.at - event.first_scheduled_at,
            epoch=self._pod.plan.epoch,
        )
        describe_token(response.first_token, event.token)
        self._pod.metrics.cached_tokens.inc(event.num_cached)
        if event.finish_reason is None:
            assert event.held is not None, "it was added to be held"  # to ask the engine would take another step
            response.handoff.CopyFrom(self._grant(entry, event.held, response))
        return response

    def _grant(self, entry: Entry, held: HeldBlocks, response: pods_pb2.PrefillResponse) -> kv_pb2.KVHandoff:
        now = self._pod.clock()
        self.table.lease(entry, now)
        self._leases.wake()
        plan = self._pod.plan
        blocks = zip(held.block_ids, held.generations, strict=True)
        group = kv_pb2.LayerGroup(
            first_layer=0,
            num_layers=plan.layout.num_layers,
            blocks=[kv_pb2.BlockRef(block_id=block, generation=generation) for block, generation in blocks],
        )
        return kv_pb2.KVHandoff(
            sequence_id=entry.sequence_id,
            source_pod_id=plan.pod_id,
            source_epoch=plan.epoch,
            source_address=self._pod.address(),
            layout_fingerprint=plan.layout.fingerprint,
            groups=[group],
            num_tokens=held.num_tokens,
            first_token=response.first_token,
            lease_id=entry.sequence_id,
            lease_remaining_ms=round(self.table.lease_remaining_s(entry, now) * 1000),
        )

    # Leases.

    def _tend_leases(self) -> bool:
        """Applies what decode pods said and frees what nobody renewed. True while leases exist."""
        for note in self._pod.endpoint.poll_notifications():
            self._apply(note)
        for entry in self.table.take_expired(self._pod.clock()):
            log.warning("lease of %s expired: no decode pod fetched or renewed it", entry.sequence_id)
            self._pod.metrics.leases_expired.inc()
            self._free_blocks(entry)
        return self.table.num_leases > 0

    def _apply(self, note: kv_pb2.LeaseNotification) -> None:
        if note.owner_epoch != self._pod.plan.epoch:
            return
        if note.action == kv_pb2.LeaseNotification.ACTION_RELEASE:
            self._release(note.lease_id)
        elif note.action == kv_pb2.LeaseNotification.ACTION_RENEW:
            self.table.renew(note.lease_id, self._pod.clock())
        else:
            log.warning("unknown action %d for lease %s", note.action, note.lease_id)

    def _release(self, lease_id: str) -> bool:
        """Ends a lease, or a computation whose caller has gone. Idempotent; False: nothing by that name is here."""
        entry = self.table.get(lease_id)
        if entry is None:
            return False
        if entry.leased:
            self._free(entry)
        elif not entry.first_token.done():
            entry.first_token.set_exception(Cancelled(f"sequence {lease_id} was released while it was computed"))
        return True

    def _free(self, entry: Entry) -> None:
        self.table.remove(entry)
        self._free_blocks(entry)

    def _free_blocks(self, entry: Entry) -> None:
        self._pod.engine.post(lambda core: core.abort(entry.sequence_id))

    # The role's side of the pod.

    def register(self, server: grpc.aio.Server) -> None:
        pods_pb2_grpc.add_PrefillPodServicer_to_server(self, server)

    token_port = None

    async def start(self) -> None:
        self._leases.start("leases")

    def on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            entry = self.table.get(event.sequence_id)
            if entry is None or entry.first_token.done():
                continue
            if event.finish_reason is FinishReason.FAILED:
                entry.first_token.set_exception(not_finite(self._pod.plan.pod_id))
            else:
                entry.first_token.set_result(event)

    def owed(self) -> Owed:
        return Owed(num_leases=self.table.num_leases)

    def begin_drain(self) -> None:
        self._draining = True

    @property
    def is_idle(self) -> bool:
        return self.table.idle.is_set()

    async def drained(self) -> None:
        await self.table.idle.wait()

    async def close(self, error: PdserveError) -> None:
        self._draining = True
        await self._leases.stop()
        for entry in self.table.entries():
            if entry.leased:
                self._free(entry)
            elif not entry.first_token.done():
                entry.first_token.set_exception(error)

    def check_invariants(self, load: EngineLoad) -> None:
        self.table.check_invariants()
        entries = self.table.entries()
        assert load.num_held == self.table.num_leases, (
            f"the engine holds {load.num_held} sequences for hand-offs, leases: {self.table.num_leases}"
        )
        assert load.num_waiting + load.num_running <= len(entries), "the engine computes what nobody asked for"
