"""GET /metrics on the event loop: a few lines of HTTP/1.1, so that a pod needs no web framework."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

REQUEST_TIMEOUT_S = 5.0


class MetricsServer:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Returns the port (a free one for 0). Raises OSError when it cannot bind."""
        self._server = await asyncio.start_server(self._handle, host, port, limit=8192)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers)
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_server runs its callback in a task"
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(head.split(b"\r\n", 1)[0]))
                    await writer.drain()
            finally:
                writer.close()
                await writer.wait_closed()

    def _response(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.partition(b" ")
        found = rest.split(b" ")[0].split(b"?")[0] == b"/metrics"
        status, body = ("200 OK", generate_latest(self._registry)) if found else ("404 Not Found", b"see /metrics\n")
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"GET or HEAD\n"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == b"HEAD" else body)
