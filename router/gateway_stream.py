"""The router's side of `GenerateMany`: all requests of one gateway on one stream, one message for all that is new.

The requests are those of `Generate` and know nothing of it. All that they say between two messages leaves in one: after
an engine step that is the news of every stream. A client that reads slowly costs its own request only: beyond what its
gateway takes ahead of it (`max_unread`) responses wait here, bounded by the answer's length, as they do behind
HTTP/2's window in `Generate`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from proto import inference_pb2
from proto.errors import InvalidRequest, PdserveError, PodUnavailable, abort
from router.requests import Sink

MAX_MESSAGE_BYTES = 4 << 20  # and one response more; far below what gRPC takes

Requests = AsyncIterator[inference_pb2.GenerateManyRequest]
Context = grpc.aio.ServicerContext[Any, Any]
# Runs a request whose client allows it so many seconds (None: any); to cancel the task is to abort the request.
Start = Callable[[inference_pb2.GenerateRequest, float | None, Sink], asyncio.Task[None]]


class _Call:
    """One request on the stream, and what of it is not sent yet."""

    def __init__(self, call_id: int, max_unread: int, on_news: Callable[[_Call], None]) -> None:
        self.id = call_id
        self.task: asyncio.Task[None] | None = None
        self.is_listed = False  # among the stream's calls that have news
        self.is_over = False  # its end was sent, or it was cancelled
        self._pending: deque[inference_pb2.GenerateResponse] = deque()
        self._ended = False
        self._error: PdserveError | None = None
        self._room = max_unread
        self._on_news = on_news

    def put(self, response: inference_pb2.GenerateResponse, /) -> None:
        self._pending.append(response)
        if not self.is_listed:
            self._tell()

    def end(self, error: PdserveError | None, /) -> None:
        self._ended, self._error = True, error
        self._tell()

    def read(self, num_responses: int) -> None:
        self._room += num_responses
        self._tell()

    def cancel(self) -> None:
        self.is_over = True
        self._pending.clear()
        if self.task is not None:
            self.task.cancel()

    @property
    def has_news(self) -> bool:
        return not self.is_over and (self._room > 0 if self._pending else self._ended)

    def _tell(self) -> None:
        if self.has_news and not self.is_listed:
            self._on_news(self)

    def fill(self, news: inference_pb2.CallNews, max_bytes: int) -> int:
        """Moves what may be sent into `news`; returns its size, which exceeds `max_bytes` by one response at most."""
        news.call_id = self.id
        size, responses = 0, news.responses
        while self._pending and self._room > 0 and size < max_bytes:
            response = self._pending.popleft()
            responses.append(response)
            size += response.ByteSize()
            self._room -= 1
        if self._ended and not self._pending:
            self.is_over = news.ended = True
            if self._error is not None:
                news.error.CopyFrom(self._error.to_info())
        return size


class GatewayStream:
    """One call of `GenerateMany`: `receive` what comes, send what `next` returns, and `cancel` when it is over."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._calls: dict[int, _Call] = {}
        self._news: deque[_Call] = deque()
        self._last_id = 0
        self._draining = self._tell_draining = False
        self._error: PdserveError | None = None
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls)

    def receive(self, message: inference_pb2.GenerateManyRequest) -> None:
        """Raises InvalidRequest for what breaks the contract of the stream; a request's own faults are its own end."""
        for start in message.starts:
            self._begin(start)
        for read in message.reads:
            if (call := self._calls.get(read.call_id)) is not None:
                call.read(read.num_responses)
        for call_id in message.cancels:
            if (call := self._calls.pop(call_id, None)) is not None:
                call.cancel()
        if self._draining:
            self._wake.set()  # what was cancelled may have been the last

    def _begin(self, start: inference_pb2.StartCall) -> None:
        if start.call_id <= self._last_id:
            raise _broken("call_id", start.call_id, f"more than {self._last_id}, the one before it")
        if start.max_unread < 1:
            raise _broken("max_unread", start.max_unread, "1 or more")
        self._last_id = start.call_id
        call = self._calls[start.call_id] = _Call(start.call_id, start.max_unread, self._list)
        if self._draining:
            call.end(PodUnavailable("the router is stopping"))
        else:
            timeout_s = start.timeout_ms / 1000 if start.HasField("timeout_ms") else None
            call.task = self._start(start.request, timeout_s, call)

    def _list(self, call: _Call) -> None:
        call.is_listed = True
        self._news.append(call)
        self._wake.set()

    def drain(self) -> None:
        """Starts nothing more. The stream ends with the last of its calls."""
        self._draining = self._tell_draining = True
        self._wake.set()

    def fail(self, error: PdserveError) -> None:
        """`next` raises `error`."""
        self._error = error
        self._wake.set()

    def cancel(self) -> None:
        """Nobody listens any more."""
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()

    async def next(self) -> inference_pb2.GenerateManyResponse | None:
        """All that is new, as soon as there is something; None once drained. Raises fail()'s error."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            message = self._take()
            if message.calls or message.draining:
                if self._news or self._draining:
                    self._wake.set()
                return message
            if self._draining and not self._calls:
                return None

    def _take(self) -> inference_pb2.GenerateManyResponse:
        message = inference_pb2.GenerateManyResponse(draining=self._tell_draining)
        self._tell_draining = False
        size = 0
        while self._news and size < MAX_MESSAGE_BYTES:
            call = self._news.popleft()
            call.is_listed = False
            if not call.has_news:
                continue  # it was cancelled
            size += call.fill(message.calls.add(), MAX_MESSAGE_BYTES - size)
            if call.is_over:
                del self._calls[call.id]
            elif call.has_news:
                self._list(call)
        return message


def _broken(field: str, value: int, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"starts.{field} = {value}: must be {allowed}", field=f"starts.{field}")


async def serve(stream: GatewayStream, requests: Requests, context: Context) -> None:
    """The call of `stream`. When it ends, however, so does all that runs for it."""
    reader = asyncio.create_task(_feed(stream, requests), name="a gateway's requests")
    try:
        while (message := await stream.next()) is not None:
            await context.write(message)
    except PdserveError as error:
        await abort(context, error)
    finally:
        stream.cancel()
        reader.cancel()


async def _feed(stream: GatewayStream, requests: Requests) -> None:
    """All that the gateway says. When it has said that this is all, what runs is finished."""
    try:
        async for message in requests:
            stream.receive(message)
    except DecodeError as error:
        stream.fail(InvalidRequest(f"the request is not a valid message: {error}"))
    except PdserveError as error:
        stream.fail(error)
    else:
        stream.drain()
