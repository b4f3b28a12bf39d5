"""A decode pod's part of a request: promise blocks, fetch the KV into them, continue the sequence, stream its tokens.

Every change to what the pod owes goes through one DecodeTable. Blocks go back to the engine in `_free` alone, and for a
sequence with a transfer in flight only after that has settled: until then a late byte could land in them.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from decode_service.admission import BlockQueue
from decode_service.messages import add_event
from decode_service.stream import TokenStream
from decode_service.table import DecodeTable, Entry, State
from decode_service.token_server import TokenServer
from engine.batch import EngineLoad, Reservation, TokenEvent
from engine.sequence import FinishReason, SequenceSpec
from kvtransfer.puller import Puller
from pod.kv_service import fetch_metadata
from pod.messages import not_finite
from pod.role import Owed, PodContext
from pod.rpc import Context, rpc
from pod.spec import cannot_run, check_duration_ms, parse_spec, refusal
from pod.ticker import Ticker
from proto import kv_pb2, pods_pb2, pods_pb2_grpc, registry_pb2
from proto.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    Overloaded,
    PdserveError,
    PodUnavailable,
)

log = logging.getLogger(__name__)

MAX_WAIT_MS = 10 * 60 * 1000
MAX_CREDIT_MS = 10 * 60 * 1000
CREDIT_TICK_S = 0.02
RETRY_AFTER_MS = 200  # and as much again for each caller that waits already
SERVICE_NAME = pods_pb2.DESCRIPTOR.services_by_name["DecodePod"].full_name


class DecodeService(pods_pb2_grpc.DecodePodServicer):
    role = registry_pb2.ROLE_DECODE
    service_names = (SERVICE_NAME,)

    def __init__(self, pod: PodContext) -> None:
        self._pod = pod
        self.table = DecodeTable()
        self._queue = BlockQueue(pod.engine)
        self.tokens = TokenServer(pod.plan.pod_id, pod.plan.epoch, self._stream_ended)
        self._puller = Puller(pod.endpoint, fetch_metadata)
        self._credits = Ticker(self._expire_credits, interval_s=CREDIT_TICK_S)
        self._draining = False
        self._step = 0

    # Credits.

    @rpc
    async def Reserve(self, request: pods_pb2.ReserveRequest, context: Context) -> pods_pb2.Credit:
        check_duration_ms("wait_ms", request.wait_ms, MAX_WAIT_MS, smallest=0)
        check_duration_ms("ttl_ms", request.ttl_ms, MAX_CREDIT_MS)
        spec = parse_spec(request.sequence, self._pod.plan.model)
        self._check_layout(request.layout_fingerprint)
        self._check_open()
        if request.HasField("source"):
            self._puller.connect(request.source)
        entry = self.table.add(Entry(spec.sequence_id, self.tokens.stream_of(request.router_id), State.WAITING))
        try:
            reservation = await self._wait_for_blocks(entry, spec, request.wait_ms / 1000)
            self.table.grant(entry, reservation, self._pod.clock(), request.ttl_ms / 1000)
        finally:
            if entry.state is State.WAITING and self.table.holds(entry):
                self._free(entry)
        self._credits.wake()
        return pods_pb2.Credit(
            credit_id=entry.sequence_id,
            epoch=self._pod.plan.epoch,
            remaining_ms=request.ttl_ms,
            num_cached_tokens=reservation.num_cached,
        )

    @rpc
    async def ReleaseCredit(
        self, request: pods_pb2.ReleaseCreditRequest, context: Context
    ) -> pods_pb2.ReleaseCreditResponse:
        entry = self.table.get(request.credit_id)
        if entry is None or entry.state is not State.RESERVED or request.epoch not in {"", self._pod.plan.epoch}:
            return pods_pb2.ReleaseCreditResponse(released=False)
        self._free(entry)
        return pods_pb2.ReleaseCreditResponse(released=True)

    async def _wait_for_blocks(self, entry: Entry, spec: SequenceSpec, wait_s: float) -> Reservation:
        """In a task of its own, so that an abort can end the wait and leave the call to answer."""
        entry.task = asyncio.create_task(self._queue.reserve(spec, wait_s), name=f"reserve {spec.sequence_id}")
        try:
            reservation: Reservation = await entry.task
        except asyncio.CancelledError:
            if self.table.holds(entry):  # nobody aborted it: the call itself was cancelled
                raise
        except TimeoutError:
            raise self._overloaded(wait_s) from None
        except ValueError as error:
            raise cannot_run(spec, error) from None
        if not self.table.holds(entry):
            self._check_open()
            raise Cancelled(f"sequence {spec.sequence_id} was aborted while it waited for blocks")
        return reservation

    def _overloaded(self, wait_s: float) -> Overloaded:
        load, places = self._pod.engine.load, self._pod.plan.settings.max_num_seqs
        blocks = f"{load.num_free_blocks} of {load.num_blocks} KV blocks are free"
        taken = f"{load.num_running + load.num_reserved} of max_num_seqs = {places} places are taken"
        return Overloaded(
            f"no room within wait_ms = {wait_s * 1000:.0f}: {blocks}, {taken}, {self._queue.num_waiting} others wait",
            retry_after_ms=RETRY_AFTER_MS * (1 + self._queue.num_waiting),
            pod_id=self._pod.plan.pod_id,
        )

    def _expire_credits(self) -> bool:
        for entry in self.table.take_expired(self._pod.clock()):
            log.warning("credit of %s expired: nobody started it", entry.sequence_id)
            self._pod.metrics.credits_expired.inc()
            self._free_blocks(entry)
        return self.table.num_credits > 0

    # Sequences.

    @rpc
    async def StartDecode(self, request: pods_pb2.StartDecodeRequest, context: Context) -> pods_pb2.StartDecodeResponse:
        spec = parse_spec(request.sequence, self._pod.plan.model)
        stream = self.tokens.stream_of(request.router_id)
        if request.HasField("handoff"):
            self._start_transfer(request, spec, stream)
        else:
            await self._start_locally(spec, stream)
        return pods_pb2.StartDecodeResponse(epoch=self._pod.plan.epoch)

    @rpc
    async def AbortSequence(
        self, request: pods_pb2.AbortSequenceRequest, context: Context
    ) -> pods_pb2.AbortSequenceResponse:
        entry = self.table.get(request.sequence_id)
        if entry is not None:
            self._abort(entry)
        return pods_pb2.AbortSequenceResponse(found=entry is not None)

    def _start_transfer(self, request: pods_pb2.StartDecodeRequest, spec: SequenceSpec, stream: TokenStream) -> None:
        """Turns the credit into a transfer that runs on by itself; its failure is told on the stream."""
        self._check_handoff(request.handoff, spec)
        if request.credit_id != spec.sequence_id:
            raise refusal("credit_id", repr(request.credit_id), f"that of sequence {spec.sequence_id!r}")
        entry = self.table.claim(request.credit_id)
        if entry is None:
            raise LeaseExpired(f"credit_id = {request.credit_id!r}: expired, used, or never given by this pod")
        entry.stream = stream
        entry.task = asyncio.create_task(self._transfer(entry, spec, request.handoff), name=f"pull {spec.sequence_id}")
        entry.task.add_done_callback(lambda task: self._transfer_ended(entry, task))

    async def _transfer(self, entry: Entry, spec: SequenceSpec, handoff: kv_pb2.KVHandoff) -> None:
        assert entry.reservation is not None, "a claimed credit has blocks"
        started = self._pod.clock()
        result = await self._puller.pull(handoff, entry.reservation.block_ids, entry.reservation.num_cached)
        if entry.state is State.SETTLING:
            return
        entry.transfer_s = self._pod.clock() - started
        entry.transfer_bytes = result.bytes
        self._pod.metrics.transfer_s.observe(entry.transfer_s)
        self._pod.metrics.transfer_bytes.inc(result.bytes)
        entry.advance(State.DECODING)  # before the call: tokens may arrive ahead of its result
        await self._pod.engine.call(lambda core: core.activate(spec))

    def _transfer_ended(self, entry: Entry, task: asyncio.Task[None]) -> None:
        """No byte can land any more, however it ended: here quarantined blocks go back."""
        error = None if task.cancelled() else task.exception()
        if not self.table.holds(entry):
            return
        if entry.state is State.SETTLING or task.cancelled():
            self._free(entry)
        elif error is not None:
            self._fail(entry, _told(error))

    async def _start_locally(self, spec: SequenceSpec, stream: TokenStream) -> None:
        self._check_open()
        entry = self.table.add(Entry(spec.sequence_id, stream, State.DECODING))
        added = False
        try:
            await self._pod.engine.call(lambda core: core.add(spec))
            added = True
        except ValueError as error:
            raise cannot_run(spec, error) from None
        finally:
            if not added and self.table.holds(entry):
                self._free(entry)

    def _fail(self, entry: Entry, error: PdserveError) -> None:
        self._pod.metrics.failed.labels(type(error).__name__).inc()
        self._tell(entry, error)
        self._free(entry)
        self.tokens.flush()

    def _tell(self, entry: Entry, error: PdserveError) -> None:
        """Reserve is a call that answers for itself; what came after it is told on the stream."""
        if entry.state in {State.TRANSFERRING, State.DECODING}:
            entry.stream.news_of(self._step, entry.sequence_id).error.CopyFrom(error.to_info())

    def _abort(self, entry: Entry) -> None:
        if entry.state is State.SETTLING:
            return
        if entry.state is State.TRANSFERRING:
            entry.advance(State.SETTLING)
        else:
            self._free(entry)
        if entry.task is not None:
            entry.task.cancel()

    def _free(self, entry: Entry) -> None:
        self.table.remove(entry)
        self._free_blocks(entry)

    def _free_blocks(self, entry: Entry) -> None:
        self._pod.engine.post(lambda core: core.abort(entry.sequence_id))
        self._queue.notify()

    # Checks.

    def _check_open(self) -> None:
        if self._draining:
            raise PodUnavailable("this pod is draining", pod_id=self._pod.plan.pod_id)

    def _check_layout(self, fingerprint: str) -> None:
        layout = self._pod.plan.layout
        if fingerprint != layout.fingerprint:
            raise LayoutMismatch(f"layout_fingerprint = {fingerprint!r}: must be {layout.fingerprint!r} of {layout}")

    def _check_handoff(self, handoff: kv_pb2.KVHandoff, spec: SequenceSpec) -> None:
        self._check_layout(handoff.layout_fingerprint)
        num_tokens = len(spec.prompt_ids) + len(spec.output_ids) - 1
        if handoff.num_tokens != num_tokens:
            raise refusal("handoff.num_tokens", handoff.num_tokens, f"{num_tokens}, all tokens but the first sampled")
        if not spec.output_ids or spec.output_ids[-1] != handoff.first_token.token_id:
            raise refusal("sequence.output_token_ids", spec.output_ids[-1:], "ended by handoff.first_token")

    def _stream_ended(self, stream: TokenStream) -> None:
        """Whatever was reserved or started for it has nobody to go to."""
        for entry in self.table.of_stream(stream):
            self._abort(entry)

    # The role's side of the pod.

    def register(self, server: grpc.aio.Server) -> None:
        pods_pb2_grpc.add_DecodePodServicer_to_server(self, server)

    async def start(self) -> None:
        self._credits.start("credits")
        await self.tokens.start(self._pod.plan.settings.host, self._pod.plan.settings.token_port)

    @property
    def token_port(self) -> int:
        return self.tokens.port

    def on_events(self, events: list[TokenEvent]) -> None:
        self._step += 1
        for event in events:
            entry = self.table.get(event.sequence_id)
            if entry is None or entry.state is not State.DECODING:
                continue
            if event.finish_reason is FinishReason.FAILED:
                self._fail(entry, not_finite(self._pod.plan.pod_id))
            else:
                self._deliver(entry, event)
        self.tokens.flush()
        self._queue.notify()

    def _deliver(self, entry: Entry, event: TokenEvent) -> None:
        news, is_first = entry.stream.news_of(self._step, entry.sequence_id), not entry.first_sent
        add_event(news, entry, event)
        if is_first:
            self._pod.metrics.cached_tokens.inc(news.num_cached_tokens)
        if event.finish_reason is not None:
            self.table.remove(entry)

    def owed(self) -> Owed:
        return Owed(num_credits=self.table.num_credits, num_transfers=self._puller.num_transfers)

    def begin_drain(self) -> None:
        self._draining = True
        for entry in self.table.entries():
            if entry.state is State.WAITING:
                self._abort(entry)

    @property
    def is_idle(self) -> bool:
        return self.table.idle.is_set()

    async def drained(self) -> None:
        await self.table.idle.wait()

    async def close(self, error: PdserveError) -> None:
        self._draining = True
        await self._credits.stop()
        for entry in self.table.entries():
            self._tell(entry, error)
            self._abort(entry)
        self.tokens.flush()
        await self.table.idle.wait()  # transfers settle in bounded time
        await self._puller.close()
        await self.tokens.close()

    def check_invariants(self, load: EngineLoad) -> None:
        self.table.check_invariants(load)
        self._puller.check_invariants()


def _told(error: BaseException) -> PdserveError:
    """What a router hears of a transfer's end. A ValueError is the engine's refusal of what it was given."""
    if isinstance(error, PdserveError):
        return error
    if isinstance(error, ValueError):
        return InvalidRequest(f"sequence: {error}", field="sequence")
    log.error("a transfer failed unexpectedly", exc_info=error)
    return InternalError(f"transfer: {type(error).__name__}: {error}")
