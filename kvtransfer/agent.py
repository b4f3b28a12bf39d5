"""NIXL's Python API over our backends: register memory, tell a peer of it, READ or WRITE between two registered spans.

Methods, arguments, results and errors are those of `nixl._api.nixl_agent` 1.5.1; docs/kvtransfer.md lists where this
agent is stricter. All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer import descs as d
from kvtransfer.agent_base import AgentBase, Notifs, as_name, checked
from kvtransfer.backends.base import Backend
from kvtransfer.config import AgentConfig, ThreadSync
from kvtransfer.descs import MEM_TYPES, XferDescs
from kvtransfer.errors import nixlInvalidParamError, nixlNoTelemetryError, nixlNotFoundError
from kvtransfer.handles import PreppedDlist, XferHandle, XferTelemetry
from kvtransfer.plan import Side, expand_strided, plan_copy
from kvtransfer.remotes import Remote, sides_of

__all__ = ["Agent", "AgentConfig", "ThreadSync"]

IS_READ = {"READ": True, "WRITE": False}
INIT_AGENT = "NIXL_INIT_AGENT"

Indices = Sequence[int] | npt.NDArray[np.integer[Any]]


class Agent(AgentBase):
    """One endpoint of transfers. Raises ValueError for an empty name, nixlNotSupportedError for a listen thread."""

    # --- transfers ---

    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> PreppedDlist:
        """Checks descriptors once for many transfers. "" or NIXL_INIT_AGENT: our side; our own name: the far side of
        a loopback. N x 5 arrays hold (address, length, device, stride, count). Raises nixlNotFoundError."""
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("Please specify a mem type for strided descriptors")
            descs = expand_strided(d.checked_rows(xfer_list, 5), MEM_TYPES[mem_type])
        else:
            descs = checked(self.get_xfer_descs(xfer_list, mem_type), XferDescs)
        agent_name = as_name(agent_name)
        local = agent_name in ("", INIT_AGENT)
        with self._lock:
            remote = None if local or agent_name == self.name else self._remotes.get(agent_name)
            sides = self._sides(descs, remote, self._chosen(backends))
        return PreppedDlist(None if local else agent_name, sides, remote)

    def _sides(self, descs: XferDescs, remote: Remote | None, chosen: Mapping[str, Backend]) -> dict[str, Side]:
        regions = {n: dict.fromkeys(r) for n, r in self._regions.items()} if remote is None else remote.regions
        return sides_of(descs, {name: r for name, r in regions.items() if name in chosen})

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: PreppedDlist,
        local_indices: Indices,
        remote_xfer_side: PreppedDlist,
        remote_indices: Indices,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> XferHandle:
        """Raises KeyError for an operation, nixlInvalidParamError for indices, lengths or sides that do not fit."""
        read = IS_READ[operation]
        if local_xfer_side.agent_name is not None or remote_xfer_side.agent_name is None:
            raise nixlInvalidParamError("the first side must be prepared as local, the second for an agent's name")
        name = self._common_backend(local_xfer_side.sides, remote_xfer_side.sides, backends)
        local = local_xfer_side.sides[name].select(local_indices)
        remote = remote_xfer_side.sides[name].select(remote_indices)
        return self._handle(read, name, local, remote, remote_xfer_side, notif_msg)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: XferDescs,
        remote_descs: XferDescs,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> XferHandle:
        """Raises as prep_xfer_dlist and make_prepped_xfer do."""
        read = IS_READ[operation]
        far = self.prep_xfer_dlist(remote_agent, checked(remote_descs, XferDescs), None, backends)
        near = self.prep_xfer_dlist("", checked(local_descs, XferDescs), None, backends)
        if far.agent_name is None:
            raise nixlNotFoundError(f"remote_agent = {remote_agent!r}: must name an agent")
        name = self._common_backend(near.sides, far.sides, backends)
        return self._handle(read, name, near.sides[name], far.sides[name], far, notif_msg)

    def _common_backend(self, near: Mapping[str, Side], far: Mapping[str, Side], backends: Sequence[str]) -> str:
        for name in self._chosen(backends):
            if name in near and name in far:
                return name
        raise nixlNotFoundError(f"no backend in common: {', '.join(near)} locally, {', '.join(far)} remotely")

    def _handle(
        self, read: bool, backend: str, local: Side, remote: Side, far: PreppedDlist, notif_msg: bytes | str
    ) -> XferHandle:
        name = far.agent_name or self.name
        plan = plan_copy(read, local, remote, None if name == self.name else name)
        return XferHandle(self.backends[backend], plan, name, as_message(notif_msg), self._peer_check(far.remote))

    def _peer_check(self, remote: Remote | None) -> Callable[[], None]:
        def check() -> None:
            if remote is not None and not self._remotes.knows(remote):
                raise nixlNotFoundError(f"agent {remote.name!r} was removed after the transfer was made")

        return check

    def transfer(self, handle: XferHandle, notif_msg: bytes | str = b"") -> str:
        """DONE or PROC. Raises what the transfer failed with, nixlRepostActiveError while it runs. Without a
        notification it sends the one given before."""
        return "DONE" if handle.start(as_message(notif_msg)) else "PROC"

    def check_xfer_state(self, handle: XferHandle) -> str:
        """DONE or PROC. Raises what the transfer failed with, nixlNotPostedError before it was posted."""
        return "DONE" if handle.done() else "PROC"

    def get_xfer_telemetry(self, handle: XferHandle) -> XferTelemetry:
        """Raises nixlNoTelemetryError without capture_telemetry, nixlNotPostedError before the transfer is over."""
        if not self._capture_telemetry:
            raise nixlNoTelemetryError("the agent was created without capture_telemetry")
        return handle.telemetry()

    def estimate_xfer_cost(self, req_handle: XferHandle) -> tuple[int, int, str]:
        """(microseconds, error, method): unknown, as NIXL answers over UCX."""
        return 0, 0, "UNKNOWN"

    def query_xfer_backend(self, handle: XferHandle) -> str:
        return handle.backend.name

    def release_xfer_handle(self, handle: XferHandle) -> None:
        """Raises nixlRepostActiveError while its bytes may still land and cannot be stopped."""
        handle.release()

    def release_dlist_handle(self, handle: PreppedDlist) -> None:
        handle.release()

    # --- notifications ---

    def get_new_notifs(self, backends: Sequence[str] = ()) -> Notifs:
        """What came since the last call, by sender and in order of arrival."""
        new: Notifs = {}
        for backend in self._chosen(backends).values():
            for sender, message in backend.take_notifs():
                new.setdefault(sender, []).append(message)
        return new

    def update_notifs(self, backends: Sequence[str] = ()) -> Notifs:
        """Adds new ones to `notifs`, where the handled ones are the caller's to remove."""
        with self._lock:
            for sender, messages in self.get_new_notifs(backends).items():
                self.notifs.setdefault(sender, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether a notification that begins with the tag (or contains it) has come; removes the first such one."""
        with self._lock:
            messages = self.update_notifs(backends).get(as_name(remote_agent_name), [])
            for message in messages:
                if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                    messages.remove(message)
                    return True
        return False

    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None) -> None:
        """Raises nixlNotFoundError for an unknown agent, nixlRemoteDisconnectError, nixlBackendError after a while."""
        name = as_name(remote_agent_name)
        chosen = self._chosen([backend] if backend is not None else ())
        with self._lock:
            reachable = chosen if name == self.name else self._remotes.get(name).regions
        for backend_name, instance in chosen.items():
            if backend_name in reachable:
                instance.notify(name, as_message(notif_msg))
                return
        raise nixlNotFoundError(f"agent {name!r} cannot be reached by {', '.join(chosen) or 'any backend'}")


def as_message(notif_msg: bytes | str) -> bytes:
    """Raises TypeError."""
    if not isinstance(notif_msg, (bytes, str)):
        raise TypeError(f"notif_msg = {type(notif_msg).__name__}: must be bytes or str")
    return notif_msg.encode() if isinstance(notif_msg, str) else notif_msg
