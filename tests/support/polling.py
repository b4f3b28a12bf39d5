"""Waiting for what nothing announces: the state of a pod as a scrape sees it, a record in a registry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 30.0  # a machine may be slow: what is wrong fails all the same
INTERVAL_S = 0.002


async def until(condition: Callable[[], bool | Awaitable[bool]], wait_s: float = WAIT_S) -> None:
    """Raises TimeoutError when `condition` does not come true within `wait_s`."""
    async with asyncio.timeout(wait_s):
        while not await _value(condition()):  # noqa: ASYNC110 - no event exists, see above
            await asyncio.sleep(INTERVAL_S)


async def _value(result: bool | Awaitable[bool]) -> bool:
    return result if isinstance(result, bool) else await result
