"""What a process that serves does around its servers: settings in, one READY line out, an exit code at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import uvloop

from proto.settings import ConfigError


class _Settings(Protocol):
    @property
    def log_level(self) -> str: ...


S = TypeVar("S", bound=_Settings)


def run(name: str, load: Callable[[], S], serve: Callable[[S], Coroutine[Any, Any, None]]) -> int:
    """Serves with the settings that `load` finds. The exit code: 0, or 2 with one line when it could not start."""
    try:
        settings = load()
        configure_logging(name, settings.log_level)
        uvloop.run(serve(settings))
    except (ConfigError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Call on the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


async def ready_until(stop: asyncio.Event, line: str) -> None:
    """All is up: says so, and waits for the stop."""
    freeze_memory()
    print(f"READY {line}", flush=True)
    await stop.wait()


def freeze_memory() -> None:
    """Call when all is there that lives as long as the process: collecting garbage looks at none of it again.

    Else a full collection takes 30 ms in a router and 100 in a pod, and every stream waits for it.
    """
    gc.collect()
    gc.freeze()


def configure_logging(process: str, level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname).1s {process} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
