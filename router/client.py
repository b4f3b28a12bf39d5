"""A thin typed client of a router, for gateways and tools. Failures are raised as the exceptions of `proto.errors`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol, Self

import grpc.aio

from proto import common_pb2, inference_pb2, inference_pb2_grpc
from proto.errors import InvalidRequest, from_rpc
from proto.service import MAX_MESSAGE_BYTES, ROUTER_PATIENCE_S, channel

STATUS_S = 2.0
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024


class Client(Protocol):
    """What is asked of a router, wherever it runs. Each call raises what `RouterClient`'s does."""

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]: ...
    async def abort(self, request_id: str) -> bool: ...
    async def list_models(self) -> list[inference_pb2.Model]: ...
    async def why_not_serving(self) -> str | None: ...
    async def timeline(self, request_id: str = "") -> inference_pb2.Ledger: ...


def check_size(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidRequest for a request that no message can carry, to a router or from there to a pod."""
    if (size := request.ByteSize()) > MAX_REQUEST_BYTES:
        raise InvalidRequest(f"the request has {size} bytes: must be at most {MAX_REQUEST_BYTES}")


class Closing(ABC):
    """An async context manager that ends with `close`."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class RouterClient(Closing):
    """One channel to the router at `address` (host:port); reconnects by itself. An async context manager."""

    def __init__(self, address: str) -> None:
        self._channel = channel(address, ROUTER_PATIENCE_S)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The answer as it comes; the last response has a finish reason. Leaving the loop early cancels the request.

        Use it under `contextlib.aclosing` when you may leave early: only then is the cancellation immediate.
        """
        call = self._stub.Generate(request, timeout=timeout_s)
        is_finished = False
        try:
            async for response in call:
                is_finished = response.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
                yield response
        except grpc.aio.AioRpcError as error:
            if not is_finished:  # a deadline that passes after the last response concerns nobody
                raise from_rpc(error) from None
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """`request_id` is the server's. False: no such request is running."""
        try:
            return (await self._stub.Abort(inference_pb2.AbortRequest(request_id=request_id))).found
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def list_models(self) -> list[inference_pb2.Model]:
        try:
            return list((await self._stub.ListModels(inference_pb2.ListModelsRequest())).models)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def why_not_serving(self) -> str | None:
        """Why a request sent now could not be served, by the router or for want of one; None when it could."""
        try:
            status = await self._stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=STATUS_S)
        except grpc.aio.AioRpcError as error:
            return f"the router cannot be reached: {from_rpc(error).message}"
        return None if status.serving else status.reason

    async def timeline(self, request_id: str = "") -> inference_pb2.Ledger:
        """Of a request that has ended, by the server's id; the most recent one by default. Raises NotFound."""
        try:
            return await self._stub.GetTimeline(inference_pb2.GetTimelineRequest(request_id=request_id))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    async def close(self) -> None:
        await self._channel.close()
