"""Bytes that are no message are the client's mistake on every server, for both kinds of methods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from proto import inference_pb2 as pb
from proto.errors import InvalidRequest, from_rpc
from proto.service import Server

SERVICE = "test.Echo"
BAD_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a string
CUT_SHORT = b"\x0a\x20id"  # 32 bytes are announced


async def reply(request: pb.AbortRequest, context: Any) -> pb.AbortRequest:
    return request


async def write(request: pb.AbortRequest, context: Any) -> None:
    await context.write(request)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = Server([SERVICE])
    decode, encode = pb.AbortRequest.FromString, pb.AbortRequest.SerializeToString
    methods: dict[str, Any] = {
        "One": grpc.unary_unary_rpc_method_handler(reply, decode, encode),
        "Many": grpc.unary_stream_rpc_method_handler(write, decode, encode),
    }
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(0)


async def call(channel: grpc.aio.Channel, method: str, data: bytes) -> bytes:
    path = f"/{SERVICE}/{method}"
    one: Any = channel.unary_unary(path)
    many: Any = channel.unary_stream(path)
    received: bytes = await one(data) if method == "One" else await many(data).read()
    return received


@pytest.mark.parametrize("data", [BAD_UTF8, CUT_SHORT, b"\xff\xff\xff"])
@pytest.mark.parametrize("method", ["One", "Many"])
async def test_undecodable_requests_are_invalid(
    channel: grpc.aio.Channel, method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, method, data)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(from_rpc(raised.value), InvalidRequest)
    assert "not a valid message" in (raised.value.details() or "")
    assert not caplog.records


@pytest.mark.parametrize("method", ["One", "Many"])
async def test_good_requests_pass(channel: grpc.aio.Channel, method: str) -> None:
    data = pb.AbortRequest(request_id="é").SerializeToString()
    assert await call(channel, method, data) == data
