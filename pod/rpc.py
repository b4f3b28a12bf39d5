"""The frame around every RPC of a pod: our exceptions become statuses, any other an InternalError and a log entry."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from proto.errors import InternalError, PdserveError, abort

log = logging.getLogger(__name__)
Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]
Service = TypeVar("Service")
Method = Callable[[Service, Request, Context], Awaitable[Response]]


def rpc(method: Method[Service, Request, Response]) -> Method[Service, Request, Response]:
    @functools.wraps(method)
    async def call(self: Service, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except PdserveError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.exception("%s failed", method.__name__)
            await abort(context, InternalError(f"{method.__name__}: {type(error).__name__}: {error}"))

    return call
