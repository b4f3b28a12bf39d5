"""A router's client for gateways: all requests on one stream (`GenerateMany`), so that a step is one message.

What a request may have here that its reader has not taken is bounded by MAX_UNREAD responses; the rest waits at the
router. When the stream breaks every request on it ends with the reason, and the next request opens another stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Iterator

import grpc.aio

from proto import common_pb2, inference_pb2, inference_pb2_grpc
from proto.errors import TRAILER, Cancelled, PdserveError, PodUnavailable, from_info, from_rpc
from router.client import RouterClient, check_size
from router.mailbox import Mailbox

MAX_UNREAD = 32  # responses: some 100 times what a client that keeps up has
PACKED_BYTES = 4 << 20  # requests of more are sent one by one

log = logging.getLogger(__name__)


class GatewayClient(RouterClient):
    """A RouterClient that is to be used by many requests at a time."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stream: _Stream | None = None
        self._streams: set[_Stream] = set()  # also those that finish what they have

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """As RouterClient.generate. Raises InvalidRequest for a request that no message can carry."""
        check_size(request)
        stream = self._usable_stream()
        call_id, responses = stream.start(request, timeout_s)
        is_finished = False
        try:
            while (response := await responses.next()) is not None:
                is_finished = response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
                yield response
                stream.note_read(call_id)
        except PdserveError:
            if not is_finished:  # what breaks after the last response concerns nobody
                raise
        finally:
            stream.cancel(call_id)

    def _usable_stream(self) -> _Stream:
        if self._stream is None or not self._stream.takes_starts:
            self._stream = stream = _Stream(self._stub)
            self._streams.add(stream)
            stream.task.add_done_callback(lambda _: self._streams.discard(stream))
        return self._stream

    @property
    def num_unread(self) -> int:
        """Responses that are here and not taken by their readers."""
        return sum(stream.num_unread for stream in self._streams)

    async def close(self) -> None:
        """Requests that still run end as cancelled."""
        await asyncio.gather(*(stream.close() for stream in list(self._streams)))
        await super().close()


class _Call:
    """One request: its responses, and how many were read since the router heard of it."""

    __slots__ = ("num_read", "responses")

    def __init__(self) -> None:
        self.responses = Mailbox[inference_pb2.GenerateResponse]()
        self.num_read = 0


class _Stream:
    """One call of GenerateMany, from its first request to its end."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub) -> None:
        self.takes_starts = True
        self._call = stub.GenerateMany()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._starts: dict[int, inference_pb2.StartCall] = {}  # not sent yet, as are these:
        self._reads: list[inference_pb2.CallRead] = []
        self._cancels: list[int] = []
        self._wake = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name="router's stream")

    @property
    def num_unread(self) -> int:
        return sum(len(call.responses) for call in self._calls.values())

    def start(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> tuple[int, Mailbox[inference_pb2.GenerateResponse]]:
        call_id, call = next(self._ids), _Call()
        timeout_ms = None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))
        self._calls[call_id] = call
        self._starts[call_id] = inference_pb2.StartCall(
            call_id=call_id, request=request, timeout_ms=timeout_ms, max_unread=MAX_UNREAD
        )
        self._wake.set()
        return call_id, call.responses

    def note_read(self, call_id: int) -> None:
        """One more response of it was read: told in halves of what the router sends ahead."""
        if (call := self._calls.get(call_id)) is None:
            return
        call.num_read += 1
        if call.num_read >= MAX_UNREAD // 2:
            self._reads.append(inference_pb2.CallRead(call_id=call_id, num_responses=call.num_read))
            call.num_read = 0
            self._wake.set()

    def cancel(self, call_id: int) -> None:
        """Idempotent; nothing is left to do once it has ended."""
        if self._calls.pop(call_id, None) is not None and self._starts.pop(call_id, None) is None:
            self._cancels.append(call_id)
            self._wake.set()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write(), name="requests to the router")
        error: PdserveError = Cancelled("the connection to the router was closed")
        try:
            await self._read()
            error = PodUnavailable("the router has ended the stream")
        except grpc.aio.AioRpcError as broken:
            error = _reason(broken)
        finally:
            self.takes_starts = False
            writer.cancel()
            self._call.cancel()
            for call in self._calls.values():
                call.responses.end(error)
            self._calls.clear()

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), inference_pb2.GenerateManyResponse):
            if message.draining:
                self.takes_starts = False
            for news in message.calls:
                self._deliver(news)

    def _deliver(self, news: inference_pb2.CallNews) -> None:
        if (call := self._calls.get(news.call_id)) is None:
            return  # cancelled a moment ago
        for response in news.responses:
            call.responses.put(response)
        if news.ended:
            del self._calls[news.call_id]
            call.responses.end(from_info(news.error) if news.HasField("error") else None)

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader hears why
            while True:
                await self._wake.wait()
                self._wake.clear()
                for message in self._messages():
                    await self._call.write(message)

    def _messages(self) -> Iterator[inference_pb2.GenerateManyRequest]:
        """All that is to be said. A call is never cancelled ahead of its start."""
        while self._starts or self._reads or self._cancels:
            starts, reads, cancels = self._take_starts(), self._reads, self._cancels
            self._reads, self._cancels = [], []
            yield inference_pb2.GenerateManyRequest(starts=starts, reads=reads, cancels=cancels)

    def _take_starts(self) -> list[inference_pb2.StartCall]:
        """In their order, as many as make a message of PACKED_BYTES, or a larger one alone."""
        taken: list[inference_pb2.StartCall] = []
        size = 0
        for start in self._starts.values():
            size += start.ByteSize()
            if taken and size > PACKED_BYTES:
                break
            taken.append(start)
        for start in taken:
            del self._starts[start.call_id]
        return taken


def _reason(broken: grpc.aio.AioRpcError) -> PdserveError:
    """What the router said, if it did; any other status is the link's and no request's fault, whatever its code."""
    if any(key == TRAILER for key, _ in broken.trailing_metadata() or ()):
        return from_rpc(broken)
    log.warning("the stream to the router broke: %s: %s", broken.code().name, broken.details())
    return PodUnavailable("the router cannot be reached: try again")
