"""The router's gRPC front door, and the assembly of one router from its settings."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from random import Random

from proto import inference_pb2, inference_pb2_grpc
from proto.errors import PdserveError, abort
from proto.metrics_server import MetricsServer
from proto.service import ROUTER_PATIENCE_S, Server
from router.cluster import Cluster
from router.gateway_stream import Context, GatewayStream, serve
from router.inference import Inference
from router.mailbox import Mailbox
from router.metrics import RouterMetrics
from router.model import load_model
from router.request import Services
from router.requests import RequestTable
from router.settings import RouterSettings
from router.tokenizer import load_tokenizer

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._streams: set[GatewayStream] = set()

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Writes, instead of being a generator, so that a client that goes away is noticed at once.

        The request runs in a task of its own: to cancel a write that is under way would break the call's status.
        """
        responses = Mailbox[inference_pb2.GenerateResponse]()
        task = self._inference.start(request, context.time_remaining(), responses)
        try:
            while (response := await responses.next()) is not None:
                await context.write(response)
        except PdserveError as error:
            await abort(context, error)
        finally:
            task.cancel()  # the client has gone, unless the request has ended

    async def GenerateMany(  # type: ignore[override]  # likewise
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest], context: Context
    ) -> None:
        stream = GatewayStream(self._inference.start)
        if self._inference.draining:
            stream.drain()
        self._streams.add(stream)
        try:
            await serve(stream, requests, context)
        finally:
            self._streams.discard(stream)

    def drain(self) -> None:
        """Gateways are to start nothing more here; gRPC's own stop refuses new calls, and new streams with them."""
        for stream in self._streams:
            stream.drain()

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(found=self._inference.abort(request.request_id))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=self._inference.models())

    async def GetTimeline(self, request: inference_pb2.GetTimelineRequest, context: Context) -> inference_pb2.Ledger:
        try:
            return self._inference.timeline(request.request_id)
        except PdserveError as error:
            await abort(context, error)

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, context: Context
    ) -> inference_pb2.GetStatusResponse:
        reason = self._inference.why_not_serving()
        return inference_pb2.GetStatusResponse(serving=reason is None, reason=reason or "")


class Router:
    """One router process (or, in tests, one of several in a process). `await start()`, later `await stop()`."""

    def __init__(self, settings: RouterSettings, rng: Random | None = None) -> None:
        """Loads the tokenizer. Raises router.model.ModelError."""
        rng = rng or Random(uuid.uuid4().int)
        self._settings = settings
        self.requests = RequestTable()
        self.cluster = Cluster(
            registry_url=settings.registry_url,
            cluster=settings.cluster,
            router_id=f"router-{uuid.uuid4().hex}",
            max_waiting=settings.max_waiting,
            rng=rng,
        )
        self.metrics = RouterMetrics(self.requests.states, self.cluster.snapshot)
        self.services = Services(
            model=load_model(settings.model, settings.served_model_name),
            tokenizer=load_tokenizer(settings.model),
            cluster=self.cluster,
            metrics=self.metrics,
            rng=rng,
            queue_wait_s=settings.queue_wait_s,
            resume_wait_s=settings.resume_wait_s,
        )
        self.inference = Inference(self.services, self.requests)
        self._service = InferenceService(self.inference)
        self._server = Server([SERVICE_NAME], ROUTER_PATIENCE_S)
        self._pods_changed = asyncio.Event()
        self._health: asyncio.Task[None] | None = None
        self._metrics_server = MetricsServer(self.metrics.registry)
        self.metrics_address = ""

    @property
    def address(self) -> str:
        return f"{self._settings.host}:{self._server.port}"

    async def start(self) -> None:
        """Raises OSError when a port is taken. Health says SERVING while some pods can serve."""
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, self._server.grpc)
        await self._server.set_serving(False)
        await self._server.start(self._settings.host, self._settings.port)
        port = await self._metrics_server.start(self._settings.host, self._settings.metrics_port)
        self.metrics_address = f"{self._settings.host}:{port}"
        self.cluster.on_change = self._pods_changed.set
        self._health = asyncio.create_task(self._keep_health(), name="health")
        await self.cluster.start()

    async def stop(self) -> None:
        """Refuses new requests, lets running ones finish for stop_grace_s, then cancels them."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.wait([self._health])
        self.inference.draining = True
        self._service.drain()
        await self._server.stop(self._settings.stop_grace_s)
        await self.requests.ended()
        self.services.huge_prompts.shutdown(wait=False, cancel_futures=True)
        await self.cluster.close()
        await self._metrics_server.stop()

    def check_invariants(self) -> None:
        self.requests.check_invariants(self.cluster)

    async def _keep_health(self) -> None:
        while True:
            await self._pods_changed.wait()
            self._pods_changed.clear()
            await self._server.set_serving(self.inference.why_not_serving() is None)
