"""What the transfer layer raises: the exceptions of NIXL's Python bindings, under their names.

    nixlError                       our common base; NIXL has none
    ├── nixlNotPostedError          the transfer was never posted
    ├── nixlInvalidParamError       an argument that can never work
    ├── nixlBackendError            the backend failed, or did not answer in time
    ├── nixlNotFoundError           no such agent, memory, backend or descriptor
    ├── nixlMismatchError           bytes that are no metadata of ours
    ├── nixlNotAllowedError         another agent already has this name
    ├── nixlRepostActiveError       the handle's transfer is still moving bytes
    ├── nixlUnknownError            only the shim to a real NIXL raises it
    ├── nixlNotSupportedError       none of our backends can do this
    ├── nixlRemoteDisconnectError   the peer is gone
    ├── nixlCancelledError          the transfer was cancelled
    └── nixlNoTelemetryError        the agent was created without capture_telemetry

Wrong Python types raise TypeError, an unknown operation, memory type or backend name KeyError, as in NIXL.
"""
# ruff: noqa: N801 - the names are NIXL's, so that a program written for it can catch them

from __future__ import annotations


class nixlError(Exception):
    """Base of all errors of the transfer layer."""


class nixlNotPostedError(nixlError):
    pass


class nixlInvalidParamError(nixlError):
    pass


class nixlBackendError(nixlError):
    pass


class nixlNotFoundError(nixlError):
    pass


class nixlMismatchError(nixlError):
    pass


class nixlNotAllowedError(nixlError):
    pass


class nixlRepostActiveError(nixlError):
    pass


class nixlUnknownError(nixlError):
    pass


class nixlNotSupportedError(nixlError):
    pass


class nixlRemoteDisconnectError(nixlError):
    pass


class nixlCancelledError(nixlError):
    pass


class nixlNoTelemetryError(nixlError):
    pass
