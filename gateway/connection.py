"""One HTTP connection: uvicorn's, which alone would wait for ever for the rest of a request's head, of any size."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import ApiError

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or their next request meets a closing one
HEAD_S = KEEP_ALIVE_S + 15.0  # from the connection's begin or the last answer to the end of the next request's head
MAX_HEAD_BYTES = 64 * 2**10  # of a request line and its headers; of the trailers of a chunked body as well
LINGER_S = 1.0  # in which the client of a refused head gets to see the refusal: what it still sends is dropped

_TOO_LARGE = ApiError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", code="head_too_large")


class Connection(HttpToolsProtocol):
    """Closed without an answer when no head is complete in time, whatever else came: nothing was asked yet.

    A head that grows too large is refused with a 431, before the parser has collected it.
    """

    head_timer: asyncio.TimerHandle | None = None  # set while a head is awaited
    collected_bytes = 0  # fed since the parser last handed on a head or a part of a body: it may hold them all
    refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser no more at a time than it may collect. What follows a head's or a body's end in one such
        part is not counted, so that the head of a pipelined request may be as large again.
        """
        start = 0
        while start < len(data) and not (self.refused or self.transport.is_closing()):
            part = data[start : start + MAX_HEAD_BYTES - self.collected_bytes]
            start += len(part)
            self.collected_bytes += len(part)
            super().data_received(part)
            if self.collected_bytes == MAX_HEAD_BYTES:
                self._refuse_head()

    def on_headers_complete(self) -> None:
        self.collected_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.collected_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.collected_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request is here already
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _refuse_head(self) -> None:
        """Without a word while another answer is awaited, which a client would take this for."""
        if self.transport.is_closing():
            return
        self.refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = _TOO_LARGE.body()
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[_TOO_LARGE.status] + headers + body)
        self.transport.write_eof()
        self._stop_timer()
        self.head_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _await_head(self) -> None:
        self._stop_timer()
        self.head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
