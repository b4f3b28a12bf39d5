"""What a router does for its clients, whether calls come by gRPC (`server`) or from its process (`local_client`)."""

from __future__ import annotations

import asyncio
import time
import uuid

from proto import inference_pb2
from proto.errors import NotFound
from router.request import Request, Services
from router.requests import MAX_TIMELINES, RequestTable, Sink


class Inference:
    """Owned by the router. Once `draining`, whoever brings calls starts nothing more."""

    def __init__(self, services: Services, requests: RequestTable) -> None:
        self.draining = False
        self._services = services
        self._requests = requests
        self._created = int(time.time())

    def start(self, message: inference_pb2.GenerateRequest, timeout_s: float | None, sink: Sink) -> asyncio.Task[None]:
        """Runs a request whose client allows it so many seconds (None: any); to cancel the task is to abort it."""
        return self._requests.start(Request(self._services, uuid.uuid4().hex, message, timeout_s), sink)

    def abort(self, request_id: str) -> bool:
        """`request_id` is the server's. False: no such request is running."""
        return self._requests.abort(request_id)

    def models(self) -> list[inference_pb2.Model]:
        model = self._services.model
        max_model_len = self._services.cluster.max_model_len(model)
        return [inference_pb2.Model(id=model.name, max_model_len=max_model_len, created=self._created)]

    def why_not_serving(self) -> str | None:
        """Why a request that came now could not be served; None when it could."""
        return self._services.cluster.why_not_serving(self._services.model)

    def timeline(self, request_id: str) -> inference_pb2.Ledger:
        """Of a request that has ended; the most recent one for "". Raises NotFound."""
        ledger = self._requests.timeline(request_id)
        if ledger is None:
            known = f"must be the server's id of one of the last {MAX_TIMELINES} requests that have ended"
            raise NotFound(f"request_id = {request_id!r}: {known}", field="request_id")
        return ledger
