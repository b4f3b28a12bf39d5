"""One try to serve a request on one pair of pods: the calls, and how each thing that it holds is given back.

What is held when is not decided here: the request moves through the table of `lifecycle` and asks for a resource's
release. A release never waits. Where a call is under way, its outcome is awaited in the background and undone, so a
credit or lease that was granted in the moment of a cancellation is not lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from proto import common_pb2, kv_pb2, pods_pb2
from proto.errors import InternalError, PodUnavailable, from_info
from router.cluster import Cluster, Placement
from router.lifecycle import Resource
from router.pod_client import PodCall
from router.token_stream import SequenceStream
from router.validation import ResolvedRequest

LEASE_MS = 10_000  # the decode pod renews it while it waits to read
CREDIT_MS = 600_000  # a long prompt takes minutes; a dead router's credits end with its stream, before this
RESERVE_WAIT_MS = 200  # in the decode pod's own queue; then another pod may be better

Result = TypeVar("Result")


class Attempt:
    """Owned by one request. Its sequence id is the placement's owner."""

    def __init__(self, cluster: Cluster, placement: Placement, request: ResolvedRequest, output_ids: list[int]) -> None:
        self.placement = placement
        self.sequence_id = placement.owner
        self._cluster = cluster
        self._request = request
        self._output_ids = output_ids  # the request's own list: grows with the answer
        self._stream: SequenceStream | None = None
        self._reserving: asyncio.Task[pods_pb2.Credit] | None = None
        self._prefill_call: PodCall[pods_pb2.PrefillResponse] | None = None
        self._prefilling: asyncio.Task[pods_pb2.PrefillResponse] | None = None
        self._starting: asyncio.Task[pods_pb2.StartDecodeResponse] | None = None
        self._prefilled: pods_pb2.PrefillResponse | None = None
        self._release: dict[Resource, Callable[[], None]] = {
            Resource.STREAM: self._close_stream,
            Resource.SEQUENCE: self._release_sequence,
            Resource.CREDIT: self._release_credit,
            Resource.PREFILL: self._release_prefill,
            Resource.LEASE: self._release_lease,
            Resource.PREFILL_SLOT: self._free_prefill_slot,
            Resource.DECODE_SLOT: self._free_decode_slot,
        }

    # Calls to pods. Each runs in a task of its own, which a cancelled request leaves to its release.

    async def reserve(self) -> pods_pb2.Credit:
        decode, prefill = self.placement.decode, self.placement.prefill
        assert prefill is not None, "only a pair needs a credit"
        call = decode.reserve(
            pods_pb2.ReserveRequest(
                router_id=decode.tokens.router_id,
                sequence=self._spec(),
                layout_fingerprint=prefill.pod.fingerprint,
                wait_ms=RESERVE_WAIT_MS,
                ttl_ms=CREDIT_MS,
                source=kv_pb2.KVSource(pod_id=prefill.pod.pod_id, epoch=prefill.pod.epoch, address=prefill.pod.address),
            )
        )
        self._reserving = asyncio.create_task(call.result(), name=f"reserve {self.sequence_id}")
        return await asyncio.shield(self._reserving)

    async def prefill(self) -> pods_pb2.PrefillResponse:
        """Raises InternalError for an answer that is neither finished nor handed off."""
        prefill = self.placement.prefill
        assert prefill is not None, "decode-only has no prefill pod"
        self._prefill_call = prefill.prefill(pods_pb2.PrefillRequest(sequence=self._spec(), lease_ms=LEASE_MS))
        self._prefilling = asyncio.create_task(self._prefill_call.result(), name=f"prefill {self.sequence_id}")
        response = await asyncio.shield(self._prefilling)
        if response.epoch != prefill.pod.epoch:
            why = f"another epoch answered: {response.epoch} != {prefill.pod.epoch}"
            raise PodUnavailable(f"pod {prefill.pod.pod_id}: {why}", pod_id=prefill.pod.pod_id)
        if response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED and not response.HasField("handoff"):
            raise InternalError(f"pod {prefill.pod.pod_id}: neither a hand-off nor a finish reason")
        self._prefilled = response
        return response

    async def start(self) -> None:
        """StartDecode, with the hand-off if there is one. Tokens arrive by `next()`."""
        decode = self.placement.decode
        self._stream = decode.tokens.open(self.sequence_id)
        request = pods_pb2.StartDecodeRequest(router_id=decode.tokens.router_id, sequence=self._spec())
        if self._prefilled is not None:
            request.handoff.CopyFrom(self._prefilled.handoff)
            request.credit_id = self._credit_id()
        self._starting = asyncio.create_task(decode.start(request).result(), name=f"start {self.sequence_id}")
        await asyncio.shield(self._starting)

    async def next(self) -> pods_pb2.SequenceTokens:
        """The decode pod's next tokens. Raises what ended the attempt instead."""
        assert self._stream is not None, "nothing was started"
        tokens = await self._stream.next()
        assert tokens is not None, "a token stream ends with an error"
        if tokens.HasField("error"):
            raise from_info(tokens.error)
        return tokens

    def _spec(self) -> pods_pb2.SequenceSpec:
        return pods_pb2.SequenceSpec(
            sequence_id=self.sequence_id,
            prompt_token_ids=self._request.prompt_ids,
            output_token_ids=self._output_ids,
            sampling=self._request.sampling,
            priority=self._request.priority,
            cache_salt=self._request.cache_salt,
        )

    def _credit_id(self) -> str:
        assert self._reserving is not None, "a hand-off needs a credit"
        return self._reserving.result().credit_id

    # Giving back.

    def settle(self, resource: Resource) -> None:
        """Its owner has freed it; what is left is ours to forget."""
        if resource in (Resource.STREAM, Resource.PREFILL_SLOT, Resource.DECODE_SLOT):
            self._release[resource]()

    def release(self, resource: Resource) -> None:
        """Frees what is ours at once, and tells pods in the background."""
        self._release[resource]()

    def _tell(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self._cluster.background.spawn(work, f"{what} {self.sequence_id}")

    def _close_stream(self) -> None:
        self.placement.decode.tokens.close_sequence(self.sequence_id)

    def _free_prefill_slot(self) -> None:
        self._cluster.free_prefill(self.placement)

    def _free_decode_slot(self) -> None:
        self._cluster.free_decode(self.placement)

    def _release_sequence(self) -> None:
        if self._starting is not None:
            self._tell(self._abort(self._starting), "abort")

    def _release_credit(self) -> None:
        if self._reserving is not None:
            self._tell(self._give_back_credit(self._reserving), "release credit of")

    def _release_prefill(self) -> None:
        if self._prefilling is not None and self._prefill_call is not None:
            self._prefill_call.cancel()
            self._tell(self._give_back_prefill(self._prefilling), "release prefill of")

    def _release_lease(self) -> None:
        prefill = self.placement.prefill
        if prefill is not None and self._prefilled is not None:
            lease_id, epoch = self._prefilled.handoff.lease_id, self._prefilled.epoch
            self._tell(prefill.release_lease(lease_id, epoch), "release lease of")

    async def _abort(self, starting: asyncio.Task[pods_pb2.StartDecodeResponse]) -> None:
        await _outcome(starting)
        await self.placement.decode.abort(self.sequence_id)

    async def _give_back_credit(self, reserving: asyncio.Task[pods_pb2.Credit]) -> None:
        credit = await _outcome(reserving)
        if credit is not None:
            await self.placement.decode.release_credit(credit)

    async def _give_back_prefill(self, prefilling: asyncio.Task[pods_pb2.PrefillResponse]) -> None:
        """A pod names a lease after its sequence, so one that was granted just before the cancellation is found."""
        response, prefill = await _outcome(prefilling), self.placement.prefill
        assert prefill is not None, "there was a prefill call"
        await prefill.release_lease(self.sequence_id, prefill.pod.epoch if response is None else response.epoch)


async def _outcome(task: asyncio.Task[Result]) -> Result | None:
    """What the task returns; None when it failed or was cancelled."""
    await asyncio.wait([task])
    return None if task.cancelled() or task.exception() is not None else task.result()
