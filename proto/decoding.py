"""A request that is no valid message (cut short, or a string that is not UTF-8) is the client's mistake, and told so.

grpc.aio alone answers UNKNOWN, which callers take for a bug of the server, and logs a traceback for each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from proto.errors import InvalidRequest, abort

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Method = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Undecodable:
    reason: str


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for what does not decode, for every method that takes one message and is a coroutine."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        method: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(method):
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(_refusing(method), _decoding(handler.request_deserializer), handler.response_serializer)


def _decoding(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_tell(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return decode_or_tell


def _refusing(method: Method) -> Method:
    @functools.wraps(method)
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, _Undecodable):
            await abort(context, InvalidRequest(f"the request is not a valid message: {request.reason}"))
        return await method(request, context)

    return call
