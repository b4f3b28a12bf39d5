"""The live requests of a router with their tasks, and the ledgers of those that have ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from proto import inference_pb2
from proto.errors import Cancelled, InternalError, PdserveError
from router.cluster import Cluster
from router.request import Request

MAX_TIMELINES = 1000


class Sink(Protocol):
    """Where a request's responses go, and then how it ended, once. Neither call waits: a client holds up no pod."""

    def put(self, item: inference_pb2.GenerateResponse, /) -> None: ...
    def end(self, error: PdserveError | None, /) -> None: ...


class RequestTable:
    """The live requests with their tasks, and the ledgers of the last MAX_TIMELINES."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[Request, asyncio.Task[None]]] = {}
        self._ledgers: OrderedDict[str, inference_pb2.Ledger] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def start(self, request: Request, sink: Sink) -> asyncio.Task[None]:
        """Runs the request in a task of its own; to cancel it is to abort the request."""
        task = asyncio.create_task(request.run(sink.put), name=f"request {request.id}")
        self._live[request.id] = request, task
        task.add_done_callback(lambda _: self._ended(request, task, sink))
        return task

    def _ended(self, request: Request, task: asyncio.Task[None], sink: Sink) -> None:
        del self._live[request.id]
        self._ledgers[request.id] = request.ledger()
        while len(self._ledgers) > MAX_TIMELINES:
            self._ledgers.popitem(last=False)
        sink.end(_error_of(request, task))

    def abort(self, request_id: str) -> bool:
        entry = self._live.get(request_id)
        return entry is not None and entry[1].cancel()

    async def ended(self) -> None:
        """Returns when no request is left."""
        while self._live:
            await asyncio.wait([task for _, task in self.live()])

    def timeline(self, request_id: str) -> inference_pb2.Ledger | None:
        """Of a request that has ended; the most recent one for ""."""
        if not request_id and self._ledgers:
            return next(reversed(self._ledgers.values()))
        return self._ledgers.get(request_id)

    def live(self) -> list[tuple[Request, asyncio.Task[None]]]:
        return list(self._live.values())

    def states(self) -> list[str]:
        return [request.state.value for request, _ in self.live()]

    def check_invariants(self, cluster: Cluster) -> None:
        """Raises AssertionError naming a request without its task, or what is held for one that is gone."""
        for request, task in self._live.values():
            assert not task.done(), f"request {request.id} ({request.state.value}) has no task"
        cluster.check_invariants({request.sequence_id for request, _ in self._live.values()})


def _error_of(request: Request, task: asyncio.Task[None]) -> PdserveError | None:
    """What the client is told of a request that has ended; None: it has the whole answer."""
    if task.cancelled():
        return Cancelled(f"request {request.id} was aborted")
    error = task.exception()
    if error is None or isinstance(error, PdserveError):
        return error
    return InternalError(f"request {request.id}: {type(error).__name__}: {error}")
