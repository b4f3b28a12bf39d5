"""A router that plays a script: a real grpc.aio `Inference` server whose answers a test writes down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from proto import common_pb2 as pb
from proto.errors import NotFound, PdserveError, abort
from proto.inference_pb2 import (
    AbortRequest,
    AbortResponse,
    Attempt,
    GenerateRequest,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    GetTimelineRequest,
    Ledger,
    LedgerEntry,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Usage,
)
from proto.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from proto.service import Server
from router.gateway_stream import Context, GatewayStream, Requests, serve
from router.requests import Sink

Step = GenerateResponse | PdserveError | asyncio.Event  # an event is waited for
Script = Callable[[GenerateRequest], Sequence[Step]]

MODEL = Model(id="fake", max_model_len=4096, created=1_700_000_000)
LEDGER = Ledger(
    request_id="req-7",
    client_request_id="mine",
    wall_s=0.5,
    ttft_s=0.25,
    entries=[LedgerEntry(stage="queue", seconds=0.5)],
    attempts=[Attempt(prefill_pod="p", decode_pod="d", reason="idle")],
    transfer_bytes=2**40,
    outcome="stop",
)


def token(text: str, token_id: int = 65, logprob: float | None = None, top: dict[str, float] | None = None) -> Any:
    """A token; with `logprob` it looks as if logprobs had been asked for."""
    if logprob is None:
        return pb.TokenOutput(token_id=token_id)
    alternatives = [pb.TopLogprob(text=t, raw=t.encode(), logprob=p) for t, p in (top or {}).items()]
    return pb.TokenOutput(token_id=token_id, logprob=logprob, text=text, raw=text.encode(), top_logprobs=alternatives)


def answer(
    *texts: str,
    request_id: str = "req-1",
    prompt_tokens: int = 5,
    cached_tokens: int = 2,
    finish: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP,
) -> list[Step]:
    """One token a text, in one message each; the last one finishes."""
    first = Usage(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    last = Usage(prompt_tokens=prompt_tokens, completion_tokens=len(texts), cached_tokens=cached_tokens)
    messages = [
        GenerateResponse(request_id=request_id, model="fake", text=text, tokens=[token(text)]) for text in texts
    ]
    messages[0].usage.CopyFrom(first)
    messages[-1].usage.CopyFrom(last)
    messages[-1].finish_reason = finish
    return list(messages)


class ScriptedRouter(InferenceServicer):
    """`script` is called for each request. `cancelled` gets those that their client gave up."""

    def __init__(self) -> None:
        self.script: Script = lambda request: answer("Hello", " world")
        self.requests: list[GenerateRequest] = []
        self.arrived: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.cancelled: asyncio.Queue[GenerateRequest] = asyncio.Queue()
        self.streams: list[GatewayStream] = []  # all that there were
        self.status = GetStatusResponse(serving=True)
        self.server = Server(["pdserve.v1.Inference"])
        self.address = ""

    async def start(self) -> None:
        add_InferenceServicer_to_server(self, self.server.grpc)
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"
        await self.server.set_serving(True)

    async def stop(self) -> None:
        await self.server.stop(0)

    def play(self, *steps: Step) -> None:
        self.script = lambda request: steps

    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802 - gRPC's
        raise NotImplementedError("a gateway's requests come by GenerateMany")

    async def GenerateMany(self, requests: Requests, context: Context) -> None:  # type: ignore[override]  # noqa: N802 - as the router's
        self.streams.append(GatewayStream(self._start))
        await serve(self.streams[-1], requests, context)

    def _start(self, request: GenerateRequest, timeout_s: float | None, sink: Sink) -> asyncio.Task[None]:
        self.requests.append(request)
        self.arrived.put_nowait(request)
        return asyncio.create_task(self._play(request, sink))

    async def _play(self, request: GenerateRequest, sink: Sink) -> None:
        error: PdserveError | None = None
        try:
            for step in self.script(request):
                if isinstance(step, PdserveError):
                    error = step
                    break
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    sink.put(step)
        except asyncio.CancelledError:
            self.cancelled.put_nowait(request)
            raise
        sink.end(error)

    async def Abort(self, request: AbortRequest, context: Any) -> AbortResponse:  # noqa: N802 - gRPC's
        return AbortResponse()

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:  # noqa: N802 - gRPC's
        return ListModelsResponse(models=[MODEL])

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:  # noqa: N802 - gRPC's
        return self.status

    async def GetTimeline(self, request: GetTimelineRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Ledger:  # noqa: N802 - gRPC's
        if request.request_id not in ("", LEDGER.request_id):
            await abort(context, NotFound(f"request_id = {request.request_id!r} is not known", field="request_id"))
        return LEDGER
