"""Driving the reads of one pull to their end: landed, or certain never to land."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from kvtransfer.agent import Agent
from kvtransfer.errors import nixlRepostActiveError
from kvtransfer.handles import XferHandle
from kvtransfer.peers import retrieve
from kvtransfer.transfer import Transfer

POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Reader:
    """`cut_off()` must make every read from the peer settle: the last resort for one that cannot be cancelled."""

    agent: Agent
    threads: Executor
    timeout_s: float
    settle_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    cut_off: Callable[[], None]

    async def read_all(self, transfer: Transfer, handles: Sequence[XferHandle]) -> None:
        """Posts all and returns when all have landed. When one fails, time is up or the caller is cancelled, the
        others are stopped, and it raises only when all have settled: nixlError, TimeoutError, CancelledError."""
        stop = asyncio.Event()
        for _ in handles:
            transfer.read_posted()
        reads = [asyncio.create_task(self._read(transfer, handle, stop)) for handle in handles]
        for read in reads:
            read.add_done_callback(retrieve)
        try:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            transfer.fail()
            raise
        finally:
            stop.set()
            await outlast(reads)
        for read in done:  # not in `reads`: those that were stopped did not fail by themselves
            read.result()

    async def _read(self, transfer: Transfer, handle: XferHandle, stop: asyncio.Event) -> None:
        """Returns or raises only when the read has settled."""
        try:
            if stop.is_set():  # cancelled before it began
                return
            post = asyncio.get_running_loop().run_in_executor(self.threads, self.agent.transfer, handle)
            await outlast([post])
            post.result()
            await self._finish(transfer, handle, stop)
        except BaseException:
            transfer.fail()
            raise
        finally:
            transfer.read_settled()

    async def _finish(self, transfer: Transfer, handle: XferHandle, stop: asyncio.Event) -> None:
        """Raises TimeoutError when it had to be stopped for want of time."""
        deadline = self.clock() + self.timeout_s
        while not handle.done() and not stop.is_set() and self.clock() < deadline:
            await self.sleep(POLL_S)
        finished = handle.done()
        if not finished:
            transfer.fail()
        await self._settle(handle)
        if not finished and not stop.is_set():
            raise TimeoutError(f"a read did not finish within {self.timeout_s} s")

    async def _settle(self, handle: XferHandle) -> None:
        """Frees the handle; cancels the read if it is in progress. Over when no byte of it can land any more."""
        patience_ends = self.clock() + self.settle_s
        while True:
            try:
                self.agent.release_xfer_handle(handle)
                return
            except nixlRepostActiveError:
                if self.clock() >= patience_ends:
                    self.cut_off()
                await self.sleep(POLL_S)


async def outlast(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Waits for all of them, whatever is done to the waiter meanwhile; only then lets a cancellation through."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
