"""Calls to one incarnation (id and epoch) of one pod. Everything that goes wrong comes out as a `PdserveError`.

A status that the pod did not raise itself (a broken link, a timeout of ours) is `PodLost` with this pod's id,
`PodUnavailable` when nobody listened at its address, or `CutOff` when this router stood still a moment ago. A pod that
is lost fails every call under way at once: gRPC alone would wait for a hung process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc.aio

from proto import pods_pb2, pods_pb2_grpc
from proto.errors import TRAILER, PdserveError, PodUnavailable, from_rpc
from proto.service import channel
from router.background import current_task_is_cancelled
from router.failures import CutOff, PodLost
from router.snapshot import PodView
from router.token_stream import StreamReader

log = logging.getLogger(__name__)

CALL_S = 3.0  # any call that does not wait for work
STEP_S = 60.0  # one that waits for an engine step, such as 512 prompt tokens of a large model take on a CPU
Response = TypeVar("Response")


class PodCall(Generic[Response]):
    """A call under way."""

    def __init__(self, client: PodClient, call: Any) -> None:
        self._client = client
        self._call = call
        self._lost: PodUnavailable | None = None

    def cancel(self) -> None:
        self._call.cancel()

    def lose(self, error: PodUnavailable) -> None:
        """The pod is lost, or what the call is for: `result()` raises `error` now."""
        self._lost = error
        self._call.cancel()

    async def result(self) -> Response:
        try:
            response: Response = await self._call
        except grpc.aio.AioRpcError as error:
            raise self._client.error_of(error) from None
        except asyncio.CancelledError:
            if self._lost is None or current_task_is_cancelled():
                raise
            raise self._lost from None
        else:
            return response
        finally:
            self._client.calls.discard(self)


def _never_sent(error: grpc.aio.AioRpcError) -> bool:
    """gRPC has no code for it; if its words change, such a failure merely counts against the request again."""
    return (error.details() or "").startswith("failed to connect to all addresses")


class PodClient:
    """What clients of both roles share."""

    def __init__(self, pod: PodView, clock: Callable[[], float], stood_still: Callable[[], bool]) -> None:
        """`stood_still`: whether this router did, a moment ago."""
        self.pod = pod
        self.calls: set[PodCall[Any]] = set()
        self._clock = clock
        self._stood_still = stood_still
        self._closed = False
        self._failed_at: float | None = None  # it did not answer then, and has not been heard of since
        self._channel = channel(pod.address)
        self._channel.get_state(try_to_connect=True)  # so that the first request does not wait for it

    def call(self, method: Any, request: Any, timeout_s: float | None) -> PodCall[Any]:
        """Raises PodUnavailable once closed."""
        if self._closed:
            raise PodUnavailable(f"pod {self.pod.pod_id} is gone", pod_id=self.pod.pod_id)
        call: PodCall[Any] = PodCall(self, method(request, timeout=timeout_s))
        self.calls.add(call)
        return call

    def error_of(self, error: grpc.aio.AioRpcError) -> PdserveError:
        if any(key == TRAILER for key, _ in error.trailing_metadata() or ()):
            return from_rpc(error, self.pod.pod_id)
        why = f"pod {self.pod.pod_id}: {error.code().name}: {error.details()}"
        if not _never_sent(error) and self._stood_still():
            return CutOff(why, pod_id=self.pod.pod_id)
        self._failed_at = self._clock()
        return (PodUnavailable if _never_sent(error) else PodLost)(why, pod_id=self.pod.pod_id)

    def lose(self, error: PodUnavailable) -> None:
        """Fails all calls under way: the pod is gone, or does not speak."""
        self._failed_at = self._clock()
        for call in list(self.calls):
            call.lose(error)

    def heard(self, beat_at: float) -> None:
        """The pod's last heartbeat was not made before `beat_at`: if that is after its failure, it gets work again."""
        if self._failed_at is not None and beat_at > self._failed_at:
            self._failed_at = None

    @property
    def reachable(self) -> bool:
        return self._failed_at is None

    async def close(self) -> None:
        self._closed = True
        self.lose(PodLost(f"pod {self.pod.pod_id}: the connection was closed", pod_id=self.pod.pod_id))
        await self._channel.close()


class PrefillClient(PodClient):
    def __init__(self, pod: PodView, clock: Callable[[], float], stood_still: Callable[[], bool]) -> None:
        super().__init__(pod, clock, stood_still)
        self._stub: pods_pb2_grpc.PrefillPodAsyncStub = pods_pb2_grpc.PrefillPodStub(self._channel)

    def prefill(self, request: pods_pb2.PrefillRequest) -> PodCall[pods_pb2.PrefillResponse]:
        """Takes as long as the prompt needs. Cancelling it frees everything on the pod."""
        return self.call(self._stub.Prefill, request, timeout_s=None)

    async def release_lease(self, lease_id: str, epoch: str) -> None:
        request = pods_pb2.ReleaseLeaseRequest(lease_id=lease_id, epoch=epoch)
        await self.call(self._stub.ReleaseLease, request, CALL_S).result()


class DecodeClient(PodClient):
    """Also owns the pod's token stream."""

    def __init__(
        self,
        pod: PodView,
        clock: Callable[[], float],
        stood_still: Callable[[], bool],
        router_id: str,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called whenever the token stream came up or broke."""
        super().__init__(pod, clock, stood_still)
        self._stub: pods_pb2_grpc.DecodePodAsyncStub = pods_pb2_grpc.DecodePodStub(self._channel)
        self._on_change = on_change
        self.tokens = StreamReader(pod, router_id, self._channel.channel_ready, self.abort, self._stream_changed)

    def _stream_changed(self, broken: PodUnavailable | None) -> None:
        if broken is not None:
            self.lose(broken)
        self._on_change()

    @property
    def reachable(self) -> bool:
        return self.tokens.connected

    def error_of(self, error: grpc.aio.AioRpcError) -> PdserveError:
        """A pod that does not know our stream has ended it; we may have much to read before we see that."""
        raised = super().error_of(error)
        if raised.field != "router_id":
            return raised
        if self.tokens.router_id in raised.message:
            self.tokens.cut_off("it knows this connection no more")
        return CutOff(raised.message, pod_id=self.pod.pod_id)

    def reserve(self, request: pods_pb2.ReserveRequest) -> PodCall[pods_pb2.Credit]:
        return self.call(self._stub.Reserve, request, request.wait_ms / 1000 + STEP_S)

    def start(self, request: pods_pb2.StartDecodeRequest) -> PodCall[pods_pb2.StartDecodeResponse]:
        return self.call(self._stub.StartDecode, request, STEP_S)

    async def release_credit(self, credit: pods_pb2.Credit) -> None:
        request = pods_pb2.ReleaseCreditRequest(credit_id=credit.credit_id, epoch=credit.epoch)
        await self.call(self._stub.ReleaseCredit, request, CALL_S).result()

    async def abort(self, sequence_id: str) -> None:
        request = pods_pb2.AbortSequenceRequest(sequence_id=sequence_id)
        await self.call(self._stub.AbortSequence, request, CALL_S).result()

    async def close(self) -> None:
        await self.tokens.close()
        await super().close()
