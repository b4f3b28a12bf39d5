"""A router's client in the router's own process: no connection, no serialisation, the same answers and errors.

A response goes from the request that made it into a mailbox, and from there to the reader, who owns it. What a slow
reader has not taken waits in the mailbox, bounded by the answer's length, as it does at a router of another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from proto import common_pb2, inference_pb2
from proto.errors import PdserveError, PodUnavailable, from_info
from router.client import Closing, check_size
from router.inference import Inference
from router.mailbox import Mailbox


class LocalClient(Closing):
    """A router.client.Client. Leave it before the router stops."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._running: set[asyncio.Task[None]] = set()

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """As RouterClient.generate. `request` belongs to the router from then on."""
        check_size(request)
        if self._inference.draining:
            raise PodUnavailable("the router is stopping")
        responses = Mailbox[inference_pb2.GenerateResponse]()
        task = self._start(request, timeout_s, responses)
        is_finished = False
        try:
            while (response := await responses.next()) is not None:
                is_finished = response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
                yield response
        except PdserveError as error:
            if not is_finished:  # a deadline that passes after the last response concerns nobody
                raise _as_sent(error) from None
        finally:
            task.cancel()

    def _start(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        responses: Mailbox[inference_pb2.GenerateResponse],
    ) -> asyncio.Task[None]:
        task = self._inference.start(request, timeout_s, responses)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def abort(self, request_id: str) -> bool:
        return self._inference.abort(request_id)

    async def list_models(self) -> list[inference_pb2.Model]:
        return self._inference.models()

    async def why_not_serving(self) -> str | None:
        return self._inference.why_not_serving()

    async def timeline(self, request_id: str = "") -> inference_pb2.Ledger:
        ledger = inference_pb2.Ledger()
        ledger.CopyFrom(self._inference.timeline(request_id))  # the router keeps its own
        return ledger

    async def close(self) -> None:
        """Requests that still run end as cancelled."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)


def _as_sent(error: PdserveError) -> PdserveError:
    """The exception that another process would raise: never one of the router's own subclasses, nor shared with it."""
    return from_info(error.to_info())
