"""Errors, named by who must act, and the one table that maps them to gRPC and HTTP codes.

    PdserveError
    ├── InvalidRequest        the client: this can never succeed as it is
    │   └── NotFound          no such model, request or sequence
    ├── Overloaded            the client, later (retry_after_ms)
    ├── PodUnavailable        the router: another pod can do it
    ├── TransferFailed        the router: the KV did not arrive, recompute
    │   ├── LayoutMismatch
    │   ├── LeaseExpired      also a block whose generation number no longer matches
    │   └── PeerLost
    ├── DeadlineExceeded      the client's own deadline passed
    ├── Cancelled             nobody: the client asked for it
    └── InternalError         us: a bug

An error crosses a process as a gRPC status whose trailer `pdserve-error-bin` holds an `ErrorInfo`; `from_rpc` builds
the same exception again on the other side. A status without the trailer (a dead peer, say) is classified by its code.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import grpc
import grpc.aio

from proto import common_pb2 as pb

TRAILER = "pdserve-error-bin"

# A status travels as HTTP/2 headers, of which peers take 8 KiB: message (each byte up to 3 there) and trailer together.
MAX_MESSAGE_BYTES = 1024
MAX_FIELD_BYTES = 256


def clip(text: str, max_bytes: int) -> str:
    """`text` if its UTF-8 fits, else its begin and its end around an ellipsis: errors begin with the field, quote what
    the client sent, which has no bound, and end with what is allowed."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    end = max_bytes // 3
    return f"{data[: max_bytes - 3 - end].decode(errors='ignore')}...{data[-end:].decode(errors='ignore')}"


class PdserveError(Exception):
    """Base of all errors that cross a process. `message` names the field, the value and what is allowed."""

    kind: ClassVar[pb.ErrorKind.ValueType] = pb.ERROR_KIND_INTERNAL
    transfer_failure: ClassVar[pb.TransferFailure.ValueType] = pb.TRANSFER_FAILURE_UNSPECIFIED

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0, pod_id: str = "") -> None:
        self.message = clip(message, MAX_MESSAGE_BYTES)
        self.field = clip(field, MAX_FIELD_BYTES)
        super().__init__(self.message)
        self.retry_after_ms = retry_after_ms
        self.pod_id = pod_id

    @property
    def grpc_code(self) -> grpc.StatusCode:
        return CODES[self.kind][0]

    @property
    def http_code(self) -> int:
        return CODES[self.kind][1]

    def to_info(self) -> pb.ErrorInfo:
        return pb.ErrorInfo(
            kind=self.kind,
            message=self.message,
            field=self.field,
            retry_after_ms=self.retry_after_ms,
            transfer_failure=self.transfer_failure,
            pod_id=self.pod_id,
        )


class InvalidRequest(PdserveError):
    kind = pb.ERROR_KIND_INVALID_REQUEST


class NotFound(InvalidRequest):
    kind = pb.ERROR_KIND_NOT_FOUND


class Overloaded(PdserveError):
    kind = pb.ERROR_KIND_OVERLOADED


class PodUnavailable(PdserveError):
    kind = pb.ERROR_KIND_POD_UNAVAILABLE


class TransferFailed(PdserveError):
    kind = pb.ERROR_KIND_TRANSFER_FAILED


class LayoutMismatch(TransferFailed):
    transfer_failure = pb.TRANSFER_FAILURE_LAYOUT_MISMATCH


class LeaseExpired(TransferFailed):
    transfer_failure = pb.TRANSFER_FAILURE_LEASE_EXPIRED


class PeerLost(TransferFailed):
    transfer_failure = pb.TRANSFER_FAILURE_PEER_LOST


class DeadlineExceeded(PdserveError):
    kind = pb.ERROR_KIND_DEADLINE


class Cancelled(PdserveError):
    kind = pb.ERROR_KIND_CANCELLED


class InternalError(PdserveError):
    kind = pb.ERROR_KIND_INTERNAL


# kind -> gRPC code, HTTP code. 499 is nginx's "client closed request".
CODES: dict[pb.ErrorKind.ValueType, tuple[grpc.StatusCode, int]] = {
    pb.ERROR_KIND_INVALID_REQUEST: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    pb.ERROR_KIND_NOT_FOUND: (grpc.StatusCode.NOT_FOUND, 404),
    pb.ERROR_KIND_OVERLOADED: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    pb.ERROR_KIND_POD_UNAVAILABLE: (grpc.StatusCode.UNAVAILABLE, 503),
    pb.ERROR_KIND_TRANSFER_FAILED: (grpc.StatusCode.ABORTED, 503),
    pb.ERROR_KIND_DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    pb.ERROR_KIND_CANCELLED: (grpc.StatusCode.CANCELLED, 499),
    pb.ERROR_KIND_INTERNAL: (grpc.StatusCode.INTERNAL, 500),
}

_BY_KIND: dict[pb.ErrorKind.ValueType, type[PdserveError]] = {
    cls.kind: cls
    for cls in (InvalidRequest, NotFound, Overloaded, PodUnavailable, TransferFailed, DeadlineExceeded, Cancelled)
}
_BY_TRANSFER_FAILURE: dict[pb.TransferFailure.ValueType, type[PdserveError]] = {
    cls.transfer_failure: cls for cls in (LayoutMismatch, LeaseExpired, PeerLost)
}
_BY_CODE: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: PodUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_info(info: pb.ErrorInfo) -> PdserveError:
    """The exception that `info` describes. An unknown kind is an InternalError that names it."""
    cls = _BY_KIND.get(info.kind, InternalError)
    cls = _BY_TRANSFER_FAILURE.get(info.transfer_failure, cls) if cls is TransferFailed else cls
    message = info.message
    if cls is InternalError and info.kind != pb.ERROR_KIND_INTERNAL:
        message = f"unknown error kind {info.kind}: {message}"
    return cls(message, field=info.field, retry_after_ms=info.retry_after_ms, pod_id=info.pod_id)


def from_rpc(error: grpc.aio.AioRpcError, pod_id: str = "") -> PdserveError:
    """The exception that the peer raised; without our trailer, classified by its code and blamed on `pod_id`."""
    for key, value in error.trailing_metadata() or ():
        if key == TRAILER and isinstance(value, bytes):
            return from_info(pb.ErrorInfo.FromString(value))
    cls = _BY_CODE.get(error.code(), InternalError)
    return cls(f"{error.code().name}: {error.details()}", pod_id=pod_id)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    """Ends the call with `error`'s code, message and trailer. Raises, as `context.abort` does."""
    await context.abort(error.grpc_code, error.message, ((TRAILER, error.to_info().SerializeToString()),))
