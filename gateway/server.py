"""The gateway's HTTP server: uvicorn on a socket of ours, stopped by us and not by its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or their next request meets a closing one
CANCEL_S = 1.0  # for what a stop cancels to tell its clients


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


def _as_warning(record: logging.LogRecord) -> bool:
    """A stop in the middle of an answer is no error of ours: the client hears of it, and is told to try again."""
    if record.msg == "Cancel %s running task(s), timeout graceful shutdown exceeded":
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "%s request(s) are cut off: they did not end within the drain time"
    return record.args != (0,)  # nothing runs, only connections are open


class HttpServer(uvicorn.Server):
    """Serves `app` from `start` to `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, drain_timeout_s: int) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=drain_timeout_s,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_as_warning)
        self._listener = listener
        self.address = _address(listener)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self.serve([self._listener]))

    async def stop(self) -> None:
        """Takes nothing new, lets running answers finish within the drain time, then ends the rest with an error."""
        assert self._serving is not None
        self.should_exit = True
        await self._serving
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=CANCEL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Overrides uvicorn's: the process' signals are handled in `__main__`."""
        yield
