"""One HTTP request and its answer, over raw ASGI.

Starlette's own response classes notice a lost client only while they stream. Here the connection is watched from the
moment the body has been read, so an answer that nobody waits for is cancelled at any stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError

BODY_SILENCE_S = 15.0  # without a byte of a body that is not complete
LINGER_BYTES = 64 * 2**20  # of a refused body that are read and dropped, so that the client gets to see the refusal
LINGER_S = 5.0

# Valid in JSON as they are, but line ends to clients that split lines by Unicode's rules. The bytes of a character
# cannot begin within another one in UTF-8.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a request body may take."""

    max_bytes: int
    timeout_s: float  # from the first byte to the last


class ClientGone(Exception):
    """The client closed the connection."""


class Exchange:
    """Owned by the task that serves the request. `status` is that of the answer; None until there is one."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.status: int | None = None
        self.extra_headers: dict[str, str] = {}  # go with every answer
        self._receive = receive
        self._send = send
        self._more_body = True
        self.streaming = False

    async def read_body(self, limits: BodyLimits) -> bytes:
        """The whole body. Raises ApiError 413 as soon as it is known to be too large, 408 when it falls silent or takes
        too long, and ClientGone.
        """
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limits.max_bytes:
            raise _too_large(limits.max_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.timeout_s):
                while self._more_body:
                    await self._read_part(body)
                    if len(body) > limits.max_bytes:
                        raise _too_large(limits.max_bytes)
        except TimeoutError:
            raise _late(len(body), f"it is not complete after body_timeout_s = {limits.timeout_s:g}") from None
        return bytes(body)

    async def _read_part(self, body: bytearray) -> None:
        """Adds what comes next to `body`."""
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                body += await self._body_part()
        except TimeoutError:
            raise _late(len(body), f"no more within {BODY_SILENCE_S:g} s") from None

    async def run_until_disconnect(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, or cancels it and raises ClientGone when the client goes."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            finished = task.done()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        if not finished:
            raise ClientGone
        task.result()

    async def respond(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        await self._start(status, {"content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        self.streaming = True
        await self._start(200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream")

    async def events(self, *events: bytes) -> None:
        """Sends server-sent events, each of one line of JSON or the like, in one write."""
        text = b"".join([b"data: %b\n\n" % event for event in events])
        if not text.isascii():
            for character, escaped in _LINE_ENDS:
                text = text.replace(character, escaped)
        await self._send({"type": "http.response.body", "body": text, "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Answers with `error`; once a stream has begun, with an event that is its last."""
        if self.streaming:
            self.status = error.status
            await self.events(error.body())
            await self.end_stream()
        elif self._more_body:
            await self._refuse_body(error)
        else:
            await self.respond(error.status, error.body(), error.headers)

    async def _refuse_body(self, error: ApiError) -> None:
        """Closing on a client that still sends would reset the connection, and with it the answer: linger a little."""
        body = error.body()
        await self._start(error.status, {"content-length": str(len(body)), "connection": "close", **error.headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                await self._discard(LINGER_BYTES)
        except (TimeoutError, ClientGone, asyncio.CancelledError):
            pass  # it had its chance; only a stop of the server cancels us, and the answer stays the same
        await self._send({"type": "http.response.body", "body": b""})

    async def _discard(self, max_bytes: int) -> None:
        num_bytes = 0
        while self._more_body and num_bytes <= max_bytes:
            num_bytes += len(await self._body_part())

    async def _body_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._more_body = message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, headers: Mapping[str, str], content_type: str = "application/json") -> None:
        self.status = status
        pairs = {"content-type": content_type, **self.extra_headers, **headers}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than max_body_bytes = {max_bytes}", code="body_too_large")


def _late(num_bytes: int, why: str) -> ApiError:
    return ApiError(408, f"{num_bytes} bytes of the request body came, and {why}", code="body_timeout")
