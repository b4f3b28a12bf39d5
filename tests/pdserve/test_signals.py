"""The first signal asks, each further one insists."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pdserve import signals


@pytest.mark.parametrize("first", signals.NUMBERS)
async def test_first_and_further(first: signal.Signals) -> None:
    received: asyncio.Queue[str] = asyncio.Queue()
    with signals.handled(lambda: received.put_nowait("stop"), lambda: received.put_nowait("kill")):
        for number, expected in ((first, "stop"), (signal.SIGINT, "kill"), (signal.SIGTERM, "kill")):
            os.kill(os.getpid(), number)
            async with asyncio.timeout(10):
                assert await received.get() == expected


async def test_handlers_are_taken_back() -> None:
    with signals.handled(lambda: None, lambda: None):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
