"""Ctrl-C and SIGTERM: the first asks to stop, each further one insists."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled(first: Callable[[], object], again: Callable[[], object]) -> Iterator[None]:
    """Calls `first` on the running loop for the first signal, `again` for every later one."""
    loop = asyncio.get_running_loop()
    actions = iter([first])

    def received() -> None:
        action = next(actions, again)
        action()

    for number in NUMBERS:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in NUMBERS:
            loop.remove_signal_handler(number)
