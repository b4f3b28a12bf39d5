"""Merging streams: order within each, the first error, and nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gateway.fanout import MAX_QUEUED, merge


class Source:
    """A stream of `count` numbers, then an error or, with `hang`, nothing. `closed` once it has been closed."""

    def __init__(self, count: int, *, error: Exception | None = None, hang: bool = False) -> None:
        self.given = 0
        self.closed = False
        self._count = count
        self._error = error
        self._hang = hang

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            while self.given < self._count:
                self.given += 1
                yield self.given
            if self._hang:
                await asyncio.Event().wait()
            if self._error:
                raise self._error
        finally:
            self.closed = True


async def read(*sources: Source) -> list[tuple[int, int]]:
    async with aclosing(merge([source.stream() for source in sources])) as merged:
        return [item async for item in merged]


@pytest.mark.parametrize("counts", [[3], [3, 0, 5], [200, 1]])
async def test_every_item_with_its_index_in_order(counts: list[int]) -> None:
    items = await read(*[Source(count) for count in counts])
    for index, count in enumerate(counts):
        assert [item for i, item in items if i == index] == list(range(1, count + 1))


@pytest.mark.parametrize("others", [0, 2])
async def test_the_first_error_ends_all(others: int) -> None:
    hanging = [Source(1, hang=True) for _ in range(others)]
    failing = Source(2, error=ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await read(failing, *hanging)
    assert failing.closed
    assert all(source.closed for source in hanging)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_early_closes_every_stream(count: int) -> None:
    sources = [Source(5, hang=True) for _ in range(count)]
    async with aclosing(merge([source.stream() for source in sources])) as merged:
        seen = 0
        async for _ in merged:
            seen += 1
            if seen == 2 * count:
                break
    assert all(source.closed for source in sources)


async def test_a_slow_reader_stops_the_sources() -> None:
    sources = [Source(10 * MAX_QUEUED), Source(0)]
    async with aclosing(merge([source.stream() for source in sources])) as merged:
        await anext(merged)
        for _ in range(20 * MAX_QUEUED):
            await asyncio.sleep(0)
        assert sources[0].given <= MAX_QUEUED + 3
