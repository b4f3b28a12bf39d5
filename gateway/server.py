"""The gateway's HTTP server: uvicorn on a socket of ours, stopped and drained by us and not by its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from gateway.connection import KEEP_ALIVE_S, Connection

CANCEL_S = 1.0  # for what a stop cancels to tell its clients

log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError, whose text is one line for a person."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = _reason(error)
        raise OSError(f"cannot listen on {host}:{port}: {reason}; choose another host or port") from None


def _reason(error: OSError) -> str:
    """Without the details that Python adds; name resolution has error numbers of its own."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves `app` from `start` to `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, drain_timeout_s: int) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._listener = listener
        self._drain_timeout_s = drain_timeout_s
        self.address = _address(listener)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self.serve([self._listener]))

    async def stop(self) -> None:
        """Takes nothing new, lets running answers finish within the drain time, then ends the rest with an error."""
        assert self._serving is not None
        self.should_exit = True
        await self._serving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Overrides uvicorn's, which begins the same but has a time limit that is an error to it, and does not wait for
        what it cancels: our clients then hear that they are cut off.
        """
        draining = asyncio.create_task(super().shutdown(sockets))
        await asyncio.wait([draining], timeout=self._drain_timeout_s)
        if running := list(self.server_state.tasks):
            log.warning("%d request(s) are cut off: they did not end within the drain time", len(running))
            for task in running:
                task.cancel()
            await asyncio.wait([*running, draining], timeout=CANCEL_S)
        draining.cancel()
        await asyncio.wait([draining])
        for connection in list(self.server_state.connections):  # taken as the listener closed, or nobody reads them
            connection.transport.abort()
        await asyncio.sleep(0)  # in which they are lost

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Overrides uvicorn's: the process' signals are handled in `__main__`."""
        yield
