"""Agents of one machine and user: memory shared through memfds, copied by the initiator in one go.

A transfer never involves the peer's process, so a stopped or busy peer cannot delay it. The peer takes part only when
a link is made, and its death ends the link. Parameters: `runtime_dir`, `timeout_s`.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtransfer import copying
from kvtransfer.backends import shm_wire as wire
from kvtransfer.backends.base import SETTLED, Backend, CopyPlan, Post, Region
from kvtransfer.backends.shm_link import Link, attach, make_key, parse_key
from kvtransfer.backends.shm_listener import Listener
from kvtransfer.descs import MemType
from kvtransfer.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
)
from kvtransfer.memory import SharedFile, shared_files

DEFAULT_TIMEOUT_S = 5.0


def default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "pdserve" if base else Path(tempfile.gettempdir()) / f"pdserve-{os.geteuid()}"


@dataclass(slots=True, eq=False)
class Peer:
    info: str
    directory: Path
    token: str
    attach_lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None


class ShmBackend(Backend):
    name = "shm"
    mem_types = (MemType.DRAM_SEG,)

    def __init__(self, agent_name: str, params: Mapping[str, str]) -> None:
        """Raises nixlInvalidParamError, and nixlBackendError when runtime_dir cannot be used."""
        self._runtime_dir, self._timeout_s = parse_params(params)
        self._agent_name = agent_name
        self._token = secrets.token_hex(16)
        # Guards the two tables below and every Peer.link; never held while waiting. Reentrant because the garbage
        # collector may close a forgotten agent at any allocation.
        self._lock = threading.RLock()
        self._peers: dict[str, Peer] = {}
        self._shared: dict[int, tuple[SharedFile, int]] = {}  # file id -> file, number of regions in it
        self._closed = False
        self._directory = wire.SocketDir.open(self._runtime_dir / "kv-shm")
        self._directory.sweep()
        self._listener = Listener(self._directory.listen(self._token), self._token, self._files)

    @classmethod
    def plugin_params(cls) -> dict[str, str]:
        return {"runtime_dir": str(default_runtime_dir()), "timeout_s": str(DEFAULT_TIMEOUT_S)}

    def params(self) -> dict[str, str]:
        return {"runtime_dir": str(self._runtime_dir), "timeout_s": str(self._timeout_s)}

    def _files(self) -> dict[int, SharedFile]:
        with self._lock:
            return {file_id: file for file_id, (file, _) in self._shared.items()}

    def register(self, mem_type: MemType, address: int, num_bytes: int, device: int) -> Region:
        span = shared_files.find(address, num_bytes)
        if span is None:
            raise nixlBackendError(
                f"{num_bytes} bytes at {address:#x}: the shm backend shares only memory from "
                "kvtransfer.memory.allocate('shm', ...)"
            )
        file_id = span.file.file_id
        with self._lock:
            count = self._shared.get(file_id, (span.file, 0))[1]
            if not count and len(self._shared) >= wire.MAX_FILES:
                raise nixlBackendError(f"{len(self._shared)} allocations are registered, which is the most for shm")
            self._shared[file_id] = (span.file, count + 1)
        return Region(mem_type, address, num_bytes, device, make_key(file_id, span.offset))

    def deregister(self, region: Region) -> None:
        """New peers no longer get the file; one that has it can still read it, as with NIXL."""
        file_id, _ = parse_key(region.key)
        with self._lock:
            file, count = self._shared.pop(file_id)
            if count > 1:
                self._shared[file_id] = (file, count - 1)

    def connection_info(self) -> str:
        return json.dumps({"dir": str(self._directory.path), "token": self._token})

    def add_peer(self, name: str, connection_info: str) -> None:
        directory, token = parse_connection_info(connection_info)
        with self._lock:
            known = self._peers.setdefault(name, Peer(connection_info, directory, token))
        if known.info != connection_info:
            raise nixlNotAllowedError(f"another agent named {name!r} was added before: remove it first")

    def remove_peer(self, name: str) -> None:
        with self._lock:
            peer = self._peers.pop(name, None)
            link = peer.link if peer else None
        if link is not None:
            link.shutdown()

    def connect(self, name: str) -> None:
        self._link(name)

    def _link(self, name: str, but_not: Link | None = None) -> Link:
        """The live link to a peer, made if needed; a new one when the present one is `but_not`."""
        with self._lock:
            peer = self._peers.get(name)
        if peer is None:
            raise nixlNotFoundError(f"agent {name!r} was not added, or was removed")
        with peer.attach_lock:
            link = peer.link
            if link is None or link is but_not or not link.alive():
                link = self._attach(name, peer)
        return link

    def _attach(self, name: str, peer: Peer) -> Link:
        link = attach(name, wire.SocketDir(peer.directory), peer.token, self._agent_name, self._timeout_s)
        with self._lock:
            replaced, peer.link = peer.link, link
        if replaced is not None:
            replaced.shutdown()
        self._listener.watch(link, lambda: self._forget(peer, link))
        return link

    def _forget(self, peer: Peer, link: Link) -> None:
        """Unmaps a dead peer's memory, which nobody else would give back."""
        with self._lock:
            if peer.link is link:
                peer.link = None

    def post(self, plan: CopyPlan, complete: Callable[[], None]) -> Post:
        if plan.peer is None:
            copying.run(plan, [0] * len(plan.regions))
            complete()
            return SETTLED
        link = self._link(plan.peer)
        used = [plan.regions[i] for i in np.unique(plan.region_of)]
        if not all(link.has(region) for region in used):
            link = self._link(plan.peer, but_not=link)  # registered after the link was made
        copying.run(plan, self._deltas(plan, link))
        if not link.alive():
            raise nixlRemoteDisconnectError(f"peer {plan.peer!r} died during the transfer")
        complete()
        return SETTLED

    @staticmethod
    def _deltas(plan: CopyPlan, link: Link) -> list[int]:
        """For each region of the plan that it uses, what to add to the owner's addresses."""
        used = set(np.unique(plan.region_of).tolist())
        return [link.address_of(r) - r.address if i in used else 0 for i, r in enumerate(plan.regions)]

    def notify(self, name: str, message: bytes) -> None:
        if len(message) > wire.MAX_NOTIF_BYTES:
            raise nixlInvalidParamError(
                f"notif_msg of {len(message)} bytes: at most {wire.MAX_NOTIF_BYTES} are allowed"
            )
        if name == self._agent_name:
            self._listener.add_notif(name, message)
        else:
            self._link(name).send(wire.pack(wire.NOTIF, message), self._timeout_s)

    def take_notifs(self) -> list[tuple[str, bytes]]:
        return self._listener.take_notifs()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers)
        self._directory.socket_path(self._token).unlink(missing_ok=True)
        for name in peers:
            self.remove_peer(name)
        self._listener.close()
        with self._lock:
            self._shared.clear()


def parse_params(params: Mapping[str, str]) -> tuple[Path, float]:
    """(runtime_dir, timeout_s). Raises nixlInvalidParamError."""
    unknown = set(params) - {"runtime_dir", "timeout_s", "num_threads"}
    if unknown:
        raise nixlInvalidParamError(f"parameters {sorted(unknown)}: shm takes runtime_dir and timeout_s")
    try:
        timeout_s = float(params.get("timeout_s", DEFAULT_TIMEOUT_S))
    except ValueError:
        timeout_s = -1.0
    if not 0 < timeout_s <= 3600:
        raise nixlInvalidParamError(f"timeout_s = {params['timeout_s']!r}: must be in (0, 3600] seconds")
    return Path(params.get("runtime_dir") or default_runtime_dir()).absolute(), timeout_s


def parse_connection_info(info: str) -> tuple[Path, str]:
    """(directory, token). Raises nixlMismatchError."""
    try:
        content = json.loads(info)
        directory, token = content["dir"], content["token"]
        if not isinstance(directory, str) or "\0" in directory or len(bytes.fromhex(token)) != 16:
            raise ValueError(f"directory {directory!r}, token {token!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise nixlMismatchError(f"connection info of shm cannot be read: {error}") from None
    return Path(directory), token
