"""One HTTP connection: uvicorn's, which alone would wait for ever for the rest of a request's head."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or their next request meets a closing one
HEAD_S = KEEP_ALIVE_S + 15.0  # from the connection's begin or the last answer to the end of the next request's head


class Connection(HttpToolsProtocol):
    """Closed without an answer when no head is complete in time, whatever else came: nothing was asked yet."""

    head_timer: asyncio.TimerHandle | None = None  # set while a head is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request is here already
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._stop_timer()
        self.head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
