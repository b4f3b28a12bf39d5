"""A small client of the router's gRPC API, as anyone could write it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from proto import inference_pb2 as pb
from proto import inference_pb2_grpc as pb_grpc
from proto.errors import from_rpc
from proto.service import channel


async def generate(router: str, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Streams an answer. Raises PdserveError."""
    async with channel(router) as to_router:
        try:
            async for response in pb_grpc.InferenceStub(to_router).Generate(request):
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None


async def timeline(router: str, request_id: str) -> pb.Ledger:
    """The ledger of a finished request; of the last one for an empty id. Raises PdserveError."""
    async with channel(router) as to_router:
        try:
            return await pb_grpc.InferenceStub(to_router).GetTimeline(pb.GetTimelineRequest(request_id=request_id))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
