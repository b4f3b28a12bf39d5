"""Errors keep their kind and field on the way through gRPC, whatever a client made them quote."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from proto.errors import (
    MAX_FIELD_BYTES,
    MAX_MESSAGE_BYTES,
    InvalidRequest,
    NotFound,
    PdserveError,
    abort,
    clip,
    from_rpc,
)
from proto.service import Server

SERVICE = "test.Quoting"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("x" * 10, "x" * 10),
        ("field: xxxxx: limit", "fiel...mit"),
        ("é" * 6, "éé...é"),
        ("\ud800" * 11, "????...???"),
    ],
)
def test_a_clipped_text_is_valid_and_fits(text: str, expected: str) -> None:
    assert clip(text, 10) == expected


async def received(error: PdserveError) -> PdserveError:
    """`error` as a client of a real server gets it."""

    async def refuse(request: bytes, context: Any) -> bytes:
        await abort(context, error)

    server = Server([SERVICE])
    methods: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(refuse)}
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/Call")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(b"")
    finally:
        await server.stop(0)
    assert raised.value.code() == error.grpc_code
    return from_rpc(raised.value)


@pytest.mark.parametrize("character", ["x", "é", "🎉", "\x00"])
@pytest.mark.parametrize("kind", [InvalidRequest, NotFound])
async def test_a_quoted_megabyte_does_not_change_the_error(kind: type[PdserveError], character: str) -> None:
    long = character * 2**20
    error = await received(kind(f"{long}: unknown", field=long))
    assert type(error) is kind
    assert error.message.startswith(character * 10)
    assert error.message.endswith(": unknown")
    assert len(error.message.encode()) <= MAX_MESSAGE_BYTES
    assert len(error.field.encode()) <= MAX_FIELD_BYTES
