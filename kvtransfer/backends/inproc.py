"""Agents of one process, for tests. Any memory can be registered; a transfer is a copy inside `post`.

`faults` makes the k-th post fail, stall or land late, so that every way in which a real transport misbehaves can be
played step by step, without threads or clocks.
"""

from __future__ import annotations

import enum
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtransfer import copying
from kvtransfer.backends.base import SETTLED, Backend, CopyPlan, Post, Region
from kvtransfer.descs import MemType
from kvtransfer.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlRemoteDisconnectError,
)


class Fault(enum.Enum):
    FAIL = "the post raises nixlBackendError"
    STALL = "it stays in progress until land(); cancelling it works"
    LATE = "likewise, but it cannot be cancelled: its bytes land after all, as those of a timed-out TCP READ do"


@dataclass(slots=True)
class Faults:
    """Posts are counted from 0. `land(k)` lets the stalled post k finish."""

    plan: dict[int, Fault] = field(default_factory=dict)
    num_posts: int = 0
    stalled: dict[int, StalledPost] = field(default_factory=dict)

    def next_post(self) -> tuple[int, Fault | None]:
        index = self.num_posts
        self.num_posts += 1
        return index, self.plan.get(index)

    def land(self, index: int) -> None:
        self.stalled.pop(index).land()


class StalledPost(Post):
    def __init__(self, plan: CopyPlan, finish: Callable[[], None], cancellable: bool) -> None:
        self.peer = plan.peer
        self._finish: Callable[[], None] | None = finish
        self._cancellable = cancellable
        self._disconnected = False

    def done(self) -> bool:
        if self._disconnected:
            raise nixlRemoteDisconnectError(f"peer {self.peer!r} went away during the transfer")
        return self._finish is None

    def cancel(self) -> bool:
        if self._cancellable:
            self._finish = None
        return self._finish is None

    def land(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def disconnect(self) -> None:
        self._disconnected, self._finish = self._finish is not None, None


class InprocBackend(Backend):
    name = "inproc"
    mem_types = (MemType.DRAM_SEG,)

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        if params:
            raise nixlInvalidParamError(f"parameters {', '.join(params)}: inproc has none")
        self.faults = Faults()
        self._agent_name = agent_name
        self._token = secrets.token_hex(8)
        self._peers: dict[str, str] = {}
        self._lock = threading.Lock()
        self._notifs: list[tuple[str, bytes]] = []
        _alive[self._token] = self

    @classmethod
    def plugin_params(cls) -> dict[str, str]:
        return {}

    def params(self) -> dict[str, str]:
        return {}

    def register(self, mem_type: MemType, address: int, num_bytes: int, device: int) -> Region:
        return Region(mem_type, address, num_bytes, device, key="")

    def deregister(self, region: Region) -> None:
        """Nothing to free. As with NIXL, a peer that knows the region can still read it."""

    def connection_info(self) -> str:
        return self._token

    def add_peer(self, name: str, connection_info: str) -> None:
        if not connection_info.isalnum():
            raise nixlMismatchError(f"connection info {connection_info!r}: must be hex digits")
        if self._peers.setdefault(name, connection_info) != connection_info:
            raise nixlNotAllowedError(f"another agent named {name!r} was added before")

    def remove_peer(self, name: str) -> None:
        self._peers.pop(name, None)
        for index, post in list(self.faults.stalled.items()):
            if post.peer == name:
                self.faults.stalled.pop(index).disconnect()

    def connect(self, name: str) -> None:
        self._reach(name)

    def _reach(self, name: str) -> InprocBackend:
        backend = self if name == self._agent_name else _alive.get(self._peers[name])
        if backend is None:
            raise nixlRemoteDisconnectError(f"peer {name!r} is gone")
        return backend

    def post(self, plan: CopyPlan, complete: Callable[[], None]) -> Post:
        def finish() -> None:
            copying.run(plan, [0] * len(plan.regions))
            complete()

        index, fault = self.faults.next_post()
        if fault is Fault.FAIL:
            raise nixlBackendError(f"post {index} fails as planned")
        if plan.peer is not None:
            self._reach(plan.peer)
        if fault is not None:
            self.faults.stalled[index] = post = StalledPost(plan, finish, fault is Fault.STALL)
            return post
        finish()
        return SETTLED

    def notify(self, name: str, message: bytes) -> None:
        peer = self._reach(name)
        with peer._lock:
            peer._notifs.append((self._agent_name, message))

    def take_notifs(self) -> list[tuple[str, bytes]]:
        with self._lock:
            taken, self._notifs = self._notifs, []
        return taken

    def close(self) -> None:
        _alive.pop(self._token, None)


# The "network": every open inproc backend of this process, by its token.
_alive: weakref.WeakValueDictionary[str, InprocBackend] = weakref.WeakValueDictionary()
