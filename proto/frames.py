"""Length-prefixed protobuf messages over a connection, for a stream of which every message counts in processor time.

A frame is the length of what follows (4 bytes, big-endian) and one serialised message. There is no task between socket
and message: `data_received` parses and delivers, `send` writes. An end has one reason, told once, by `closed`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

HEADER_BYTES = 4
CLOSE_S = 1.0  # how long the peer may take to read what was written before close()

Received = TypeVar("Received", bound=Message)


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameConnection(asyncio.Protocol, Generic[Received]):
    """One end of a connection on which the peer sends `received` messages of at most `max_bytes`.

    Make it on the running loop, then give it to `create_server` or to `connect()`. What `on_message` raises is a bug.
    """

    def __init__(
        self,
        received: type[Received],
        on_message: Callable[[Received], None],
        *,
        max_bytes: int,
        on_writable: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_writable` is called when the peer, having read too slowly, has caught up."""
        self.is_open = False
        self.can_write = False  # False also while the peer does not keep up: what is sent then is kept all the same
        self.heard = False  # a message has come since somebody set this to False
        self.peer = ""
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why
        self._received = received
        self._on_message = on_message
        self._max_bytes = max_bytes
        self._on_writable = on_writable
        self._why = ""
        self._part = bytearray()  # of a frame whose end has not come
        self._part_needs = 0  # bytes, before there is anything to do
        self._transport: asyncio.WriteTransport | None = None
        self._deadline: asyncio.TimerHandle | None = None  # from close() to the end

    def send(self, message: Message) -> None:
        """Does nothing once the connection has ended: whoever cares awaits `closed`."""
        if self.is_open and self._transport is not None:
            self._transport.write(frame(message.SerializeToString()))

    def close(self, why: str) -> None:
        """What was sent still goes out, within CLOSE_S; nothing is received any more. Idempotent."""
        if self._end(why) and self._transport is not None:
            self._transport.close()
            self._deadline = asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    def abort(self, why: str) -> None:
        """At once. Idempotent."""
        if self._end(why) and self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> bool:
        was_open, self.is_open, self.can_write = self.is_open, False, False
        self._why = self._why or why
        return was_open

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.is_open = self.can_write = True
        self.peer = _name(transport.get_extra_info("peername"))
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Most often one whole frame, which is parsed where it lies."""
        if self._part:
            self._part += data
            if len(self._part) < self._part_needs:
                return
            data = bytes(self._part)
            self._part.clear()
        begin, end = 0, self._frame_end(data, 0)
        while end <= len(data) and self.is_open:
            self._parse(data[begin + HEADER_BYTES : end])
            begin, end = end, self._frame_end(data, end)
        if self.is_open and begin < len(data):
            self._part += data[begin:]
            self._part_needs = end - begin

    def _frame_end(self, data: bytes, begin: int) -> int:
        """Of the frame at `begin`: past the end of `data` when that is not all of it. Aborts if it is too large."""
        if len(data) < begin + HEADER_BYTES:
            return begin + HEADER_BYTES
        size = int.from_bytes(data[begin : begin + HEADER_BYTES], "big")
        if size > self._max_bytes:
            self.abort(f"a frame of {size} bytes: must be at most {self._max_bytes}")
        return begin + HEADER_BYTES + size

    def _parse(self, payload: bytes) -> None:
        try:
            message = self._received.FromString(payload)
        except DecodeError:
            self.abort(f"a frame of {len(payload)} bytes that is no {self._received.DESCRIPTOR.name}")
            return
        self.heard = True
        self._on_message(message)

    def pause_writing(self) -> None:
        self.can_write = False

    def resume_writing(self) -> None:
        self.can_write = self.is_open
        if self.can_write:
            self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke: {exc}" if exc else "the peer ended the connection")
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.closed.done():
            self.closed.set_result(self._why)


async def connect(connection: FrameConnection[Any], address: str) -> None:
    """Connects to `address` (host:port, brackets around an IPv6 host). Raises OSError, but not soon."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: connection, host.removeprefix("[").removesuffix("]"), int(port))


def _name(address: object) -> str:
    """host:port of an internet address."""
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
