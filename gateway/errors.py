"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the matching HTTP status.

Everything that can go wrong becomes an `ApiError` before it reaches a client: bad bodies here, the router's errors by
the table of `proto.errors`, and whatever is left as a 500 that tells nothing of our insides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic_core import to_json

from proto import common_pb2 as pb
from proto.errors import MAX_FIELD_BYTES, MAX_MESSAGE_BYTES, NotFound, PdserveError, clip

_TYPES = {
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES: dict[pb.ErrorKind.ValueType, str] = {
    pb.ERROR_KIND_INVALID_REQUEST: "invalid_value",
    pb.ERROR_KIND_NOT_FOUND: "not_found",
    pb.ERROR_KIND_OVERLOADED: "rate_limit_exceeded",
    pb.ERROR_KIND_POD_UNAVAILABLE: "pod_unavailable",
    pb.ERROR_KIND_TRANSFER_FAILED: "transfer_failed",
    pb.ERROR_KIND_INTERNAL: "internal_error",
    pb.ERROR_KIND_CANCELLED: "request_cancelled",
    pb.ERROR_KIND_DEADLINE: "deadline_exceeded",
}


class ApiError(Exception):
    """An answer that is an error. `param` is the JSON path of the offending field, if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = clip(message, MAX_MESSAGE_BYTES)
        self.code = code
        self.param = None if param is None else clip(param, MAX_FIELD_BYTES)
        super().__init__(self.message)
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return to_json({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})


def invalid(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_pdserve(error: PdserveError, param: str | None = None) -> ApiError:
    """The router's error; `param` is what the client calls `error.field`, in the message too."""
    code = _CODES[error.kind]
    if isinstance(error, NotFound) and error.field == "model":
        code = "model_not_found"
    message = error.message
    if param and error.field and message.startswith(error.field):
        message = param + message[len(error.field) :]
    return ApiError(error.http_code, message, param=param, code=code, headers=_retry_headers(error))


def internal() -> ApiError:
    """For a bug of ours: the details are in the log, not in the answer."""
    return ApiError(500, "internal error in the gateway; its log has the details", code="internal_error")


def _retry_headers(error: PdserveError) -> dict[str, str]:
    """`Retry-After` has whole seconds; OpenAI's clients prefer the exact `retry-after-ms`."""
    if not error.retry_after_ms:
        return {}
    return {"retry-after": str(math.ceil(error.retry_after_ms / 1000)), "retry-after-ms": str(error.retry_after_ms)}
