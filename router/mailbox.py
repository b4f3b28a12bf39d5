"""A queue with one reader and an end: items in order, then nothing more, or an error.

It stands on the way of every token, where an asyncio.Queue, which serves many readers, takes three times as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from proto.errors import PdserveError

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ended = False
        self._error: PdserveError | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def end(self, error: PdserveError | None = None) -> None:
        """The reader gets what is there, then the end, or `error`. Only the first call counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    async def next(self) -> T | None:
        """None at the end. Raises end()'s error."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
