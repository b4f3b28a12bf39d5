"""What the agent hands out: prepared descriptor lists, transfers, and a transfer's telemetry."""
# ruff: noqa: N815 - telemetry fields have NIXL's names

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.backends.base import Backend, CopyPlan, Post
from kvtransfer.errors import (
    nixlError,
    nixlInvalidParamError,
    nixlNotPostedError,
    nixlRepostActiveError,
)
from kvtransfer.plan import Side
from kvtransfer.remotes import Remote


@dataclass(frozen=True, slots=True)
class XferTelemetry:
    """NIXL's nixlXferTelemetry: microseconds, startTime since the Unix epoch; descCount counts merged descriptors."""

    startTime: int
    postDuration: int
    xferDuration: int
    totalBytes: int
    descCount: int


class PreppedDlist:
    """One side's checked descriptors by backend. `agent_name` is None for the initiator's own side."""

    def __init__(self, agent_name: str | None, sides: dict[str, Side], remote: Remote | None) -> None:
        self.agent_name = agent_name
        self.remote = remote
        self._sides: dict[str, Side] | None = sides

    @property
    def sides(self) -> dict[str, Side]:
        """Raises nixlInvalidParamError once released."""
        if self._sides is None:
            raise nixlInvalidParamError("the prepared descriptor list was released")
        return self._sides

    def release(self) -> None:
        self._sides = None


class XferHandle:
    """One transfer, which may be posted again once it is over. Its methods are the agent's; see there."""

    def __init__(
        self, backend: Backend, plan: CopyPlan, remote_name: str, notif_msg: bytes, check_peer: Callable[[], None]
    ) -> None:
        self.backend = backend
        self.plan = plan
        self._remote_name = remote_name
        self._notif_msg = notif_msg
        self._check_peer = check_peer
        self._lock = threading.Lock()
        self._post: Post | None = None
        self._posting = False
        self._error: nixlError | None = None
        self._released = False
        self._started_at = self._posted_at = self._done_at = 0.0
        self._started_unix_s = 0.0

    def start(self, notif_msg: bytes) -> bool:
        """Posts it; True when it is over already."""
        with self._lock:
            self._check_idle()
            self._check_peer()
            self._notif_msg = notif_msg or self._notif_msg
            self._posting, self._post, self._error = True, None, None
        self._started_at, self._started_unix_s = time.monotonic(), time.time()
        try:
            self._post = self.backend.post(self.plan, self._complete)
            self._posted_at = time.monotonic()
        except nixlError as error:
            self._error = error
            raise
        finally:
            self._posting = False
        return self.done()

    def _check_idle(self) -> None:
        if self._released:
            raise nixlInvalidParamError("the transfer handle was released")
        if self.active:
            raise nixlRepostActiveError("the transfer is still in progress")

    def _complete(self) -> None:
        self._done_at = time.monotonic()
        if self._notif_msg:
            self.backend.notify(self._remote_name, self._notif_msg)

    @property
    def active(self) -> bool:
        """Whether bytes may still move."""
        if self._post is None:
            return self._posting
        try:
            return not self._post.done()
        except nixlError:
            return False

    def done(self) -> bool:
        """Raises nixlNotPostedError, and whatever the transfer failed with."""
        if self._error is not None:
            raise self._error
        if self._post is None and not self._posting:
            raise nixlNotPostedError("the transfer was not posted")
        return self._post is not None and self._post.done()

    def telemetry(self) -> XferTelemetry:
        """Raises nixlNotPostedError until the transfer is over."""
        if not self.done():
            raise nixlNotPostedError("the transfer is not complete yet")
        return XferTelemetry(
            startTime=round(self._started_unix_s * 1e6),
            postDuration=round((self._posted_at - self._started_at) * 1e6),
            xferDuration=round((self._done_at - self._started_at) * 1e6),
            totalBytes=self.plan.num_bytes,
            descCount=len(self.plan.lengths),
        )

    def release(self) -> None:
        """Cancels it where needed. Raises nixlRepostActiveError, and keeps it, while bytes may still land."""
        if self._released:
            return
        if self.active and not (self._post is not None and self._post.cancel()):
            raise nixlRepostActiveError("the transfer cannot be cancelled and is still in progress")
        self._released, self._post = True, None
        self._error = self._error or nixlInvalidParamError("the transfer handle was released")
