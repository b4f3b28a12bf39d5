"""The client of a router: what it makes of a call's end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from proto import common_pb2, inference_pb2
from proto.errors import DeadlineExceeded
from router.client import RouterClient


async def texts_of(finish_reason: common_pb2.FinishReason.ValueType) -> list[str]:
    """From a router whose call's deadline passes after one response and before its status is out."""

    async def generate(
        request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(text="x", finish_reason=finish_reason)
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_registered_method_handlers("pdserve.v1.Inference", {"Generate": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with RouterClient(f"127.0.0.1:{port}") as client:
            return [response.text async for response in client.generate(inference_pb2.GenerateRequest())]
    finally:
        await server.stop(None)


async def test_a_deadline_after_the_last_response_is_no_error() -> None:
    assert await texts_of(common_pb2.FINISH_REASON_STOP) == ["x"]


async def test_a_deadline_before_it_is_one() -> None:
    with pytest.raises(DeadlineExceeded, match="late"):
        await texts_of(common_pb2.FINISH_REASON_UNSPECIFIED)
