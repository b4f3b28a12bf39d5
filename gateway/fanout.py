"""Several streams of the router read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

MAX_QUEUED = 64  # a slow client stops the reading of the streams


class _End:
    pass


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Each item of each stream with the stream's index, as they come. The first error ends all and is raised."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for only in stream:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, T | _End | Exception]] = asyncio.Queue(MAX_QUEUED)
    pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                running -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T | _End | Exception]]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
        await queue.put((index, _End()))
    except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
        await queue.put((index, error))
