"""A queue with one reader and an end."""

from __future__ import annotations

import asyncio

import pytest

from proto.errors import Cancelled, PodUnavailable
from router.mailbox import Mailbox


async def test_items_in_order_then_the_end() -> None:
    box = Mailbox[int]()
    box.put(1)
    box.put(2)
    box.end()
    assert [await box.next(), await box.next(), await box.next(), await box.next()] == [1, 2, None, None]


async def test_an_error_comes_after_the_items_and_the_first_end_counts() -> None:
    box = Mailbox[int]()
    box.put(1)
    box.end(PodUnavailable("gone"))
    box.end(Cancelled("late"))
    assert await box.next() == 1
    for _ in range(2):
        with pytest.raises(PodUnavailable):
            await box.next()


@pytest.mark.parametrize("end", [False, True])
async def test_a_reader_that_waits_is_woken(end: bool) -> None:
    box = Mailbox[int]()
    reader = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    assert not reader.done()
    if end:
        box.end()
    else:
        box.put(7)
        box.put(8)
    assert await asyncio.wait_for(reader, 1) == (None if end else 7)


async def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    box = Mailbox[int]()
    reader = asyncio.create_task(box.next())
    await asyncio.sleep(0)
    box.put(1)  # in the moment of the cancellation
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert await box.next() == 1
