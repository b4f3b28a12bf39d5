"""What an agent has and knows: its backends, its registered memory, the agents it was told of."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvtransfer import descs as d
from kvtransfer import metadata as md
from kvtransfer.backends.base import Backend, Region
from kvtransfer.backends.inproc import InprocBackend
from kvtransfer.backends.shm import ShmBackend
from kvtransfer.config import DEFAULT_COMM_PORT, AgentConfig
from kvtransfer.descs import MemType, RegDescs, XferDescs
from kvtransfer.errors import nixlInvalidParamError, nixlNotFoundError, nixlNotSupportedError
from kvtransfer.remotes import Remotes, sides_of

log = logging.getLogger(__name__)

PLUGINS: dict[str, type[ShmBackend] | type[InprocBackend]] = {"shm": ShmBackend, "inproc": InprocBackend}
Notifs = dict[str, list[bytes]]
T = TypeVar("T")


class AgentBase:
    """The part of `Agent` that moves no data; see there."""

    def __init__(self, agent_name: str, nixl_conf: AgentConfig | None = None, instantiate_all: bool = False) -> None:
        if not agent_name:
            raise ValueError("Agent needs a non-empty name")
        conf = nixl_conf or AgentConfig()
        if conf.enable_listen:
            raise nixlNotSupportedError("enable_listen_thread: metadata travels outside the agent, over KVTransfer")
        self.name = agent_name
        self.notifs: Notifs = {}
        self.backends: dict[str, Backend] = {}
        self.plugin_list = list(PLUGINS)
        self._capture_telemetry = conf.capture_telemetry
        self._lock = threading.RLock()
        self._remotes = Remotes(agent_name)
        self._regions: dict[str, list[Region]] = {}
        self._finalizer = weakref.finalize(self, close_all, self.backends)
        for backend in self.plugin_list if instantiate_all and not nixl_conf else conf.backends:
            if backend in PLUGINS:
                self.create_backend(backend)
            else:
                log.warning("Skipping backend registration %s due to the missing plugin.", backend)

    def close(self) -> None:
        """Ends every link and thread. Not in NIXL, whose agents end when they are garbage collected, as ours do too."""
        self._finalizer()

    # --- plugins and backends ---

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Empty, with a warning, for an unknown one; so do the next three."""
        return [t.name for t in PLUGINS[backend].mem_types] if has(PLUGINS, backend) else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return PLUGINS[backend].plugin_params() if has(PLUGINS, backend) else {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return [t.name for t in self.backends[backend].mem_types] if has(self.backends, backend) else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return self.backends[backend].params() if has(self.backends, backend) else {}

    def create_backend(self, backend: str, initParams: Mapping[str, str] | None = None) -> None:
        """Raises nixlNotFoundError for an unknown plugin, nixlInvalidParamError for parameters or when it exists."""
        if backend not in PLUGINS:
            raise nixlNotFoundError(f"backend {backend!r}: must be one of {', '.join(PLUGINS)}")
        if backend in self.backends:
            raise nixlInvalidParamError(f"backend {backend!r} exists already")
        self.backends[backend] = PLUGINS[backend](self.name, initParams or {})
        self._regions[backend] = []

    def _chosen(self, backends: Sequence[str]) -> dict[str, Backend]:
        """Those named, or all. Raises KeyError."""
        return {name: self.backends[name] for name in backends} if backends else dict(self.backends)

    # --- memory ---

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> RegDescs:
        """Registers all of it, or nothing and raises: nixlNotFoundError without a backend for it, nixlBackendError."""
        reg_descs = checked(self.get_reg_descs(reg_list, mem_type), RegDescs)
        chosen = {n: b for n, b in self._chosen(backends).items() if reg_descs.getType() in b.mem_types}
        if not chosen:
            raise nixlNotFoundError(f"no backend takes memory of type {reg_descs.getType().name}")
        with self._lock:
            done: list[tuple[str, Region]] = []
            try:
                for name, backend in chosen.items():
                    done.extend((name, r) for r in register_all(backend, reg_descs))
            except BaseException:
                for name, region in done:
                    self.backends[name].deregister(region)
                raise
            for name, region in done:
                self._regions[name].append(region)
        return reg_descs

    def deregister_memory(self, dereg_list: RegDescs, backends: Sequence[str] = ()) -> None:
        """Raises nixlNotFoundError unless all of it is registered. Peers that know it still reach it, as in NIXL."""
        checked(dereg_list, RegDescs)
        with self._lock:
            found = self._registered(dereg_list, self._chosen(backends))
            for name, region in found:
                self._regions[name].remove(region)
                self.backends[name].deregister(region)

    def _registered(self, reg_descs: RegDescs, chosen: Mapping[str, Backend]) -> list[tuple[str, Region]]:
        """The regions of exactly these descriptors. Raises nixlNotFoundError when no backend has one."""
        found: list[tuple[str, Region]] = []
        for address, length, device, _ in reg_descs:
            wanted = (reg_descs.getType(), address, length, device)
            matches = [
                (name, next(r for r in self._regions[name] if region_id(r) == wanted))
                for name in chosen
                if any(region_id(r) == wanted for r in self._regions[name])
            ]
            if not matches:
                raise nixlNotFoundError(f"{length} bytes at {address:#x} are not registered")
            found += matches
        return found

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Raises nixlNotSupportedError: it is for files and objects."""
        if backend not in self.backends:
            raise ValueError(f"Backend '{backend}' not found. Available backends: {list(self.backends)}")
        raise nixlNotSupportedError(f"query_memory: backend {backend} holds memory only")

    # --- descriptors ---

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> XferDescs | None:
        """From (address, length, device) tuples or an N x 3 array with a memory type, or from tensors."""
        return d.to_xfer_descs(descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> RegDescs | None:
        """From (address, length, device, meta) tuples or an N x 3 array with a memory type, or from tensors."""
        return d.to_reg_descs(descs, mem_type)

    def get_serialized_descs(self, descs: XferDescs | RegDescs) -> bytes:
        return d.serialize(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> XferDescs | RegDescs:
        """Raises nixlMismatchError. Safe on a peer's bytes: unlike NIXL's, it is no pickle."""
        return d.deserialize(serialized_descs)

    # --- metadata: how agents learn of one another ---

    def get_agent_metadata(self) -> bytes:
        """All that a peer needs. Raises nixlInvalidParamError without a backend."""
        if not self.backends:
            raise nixlInvalidParamError("the agent has no backend that peers could reach")
        with self._lock:
            regions = {name: tuple(regions) for name, regions in self._regions.items()}
            return md.encode(md.AgentMetadata(self.name, self._connections(self.backends), regions))

    def _connections(self, backends: Iterable[str]) -> dict[str, str]:
        return {name: self.backends[name].connection_info() for name in backends}

    def get_partial_agent_metadata(
        self, descs: RegDescs, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """Of these registrations only, with how to connect if asked for. Raises nixlNotFoundError."""
        chosen = self._chosen(backends)
        with self._lock:
            found = self._registered(checked(descs, RegDescs), chosen)
            regions = {name: tuple(r for n, r in found if n == name) for name in chosen}
            connections = self._connections(chosen) if inc_conn_info else {}
            return md.encode(md.AgentMetadata(self.name, connections, regions))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """The agent's name, as bytes. May be repeated with more memory. Raises nixlMismatchError for other bytes,
        nixlNotAllowedError when another agent has that name, nixlInvalidParamError for our own name,
        nixlNotFoundError without connection info, nixlBackendError without a backend in common."""
        with self._lock:
            return self._remotes.load(md.decode(metadata), self.backends).name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Disconnects. Transfers made before cannot be posted any more. An unknown name does nothing."""
        with self._lock:
            self._remotes.remove(as_name(agent), self.backends)

    def check_remote_metadata(self, agent: str | bytes, descs: XferDescs | None = None) -> bool:
        """Whether the agent is known, with all of `descs` if given."""
        with self._lock:
            try:
                remote = self._remotes.get(as_name(agent))
                if descs:
                    sides_of(descs, remote.regions)
            except nixlNotFoundError:
                return False
        return True

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """Connects now rather than at the first transfer. Raises nixlNotFoundError, nixlRemoteDisconnectError and,
        when the peer does not answer, nixlBackendError."""
        name = as_name(remote_agent)
        with self._lock:
            common = [b for b in self._remotes.get(name).regions if b in self._chosen(backends)]
        for backend in common:
            self.backends[backend].connect(name)

    # --- what none of our backends does ---

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        raise unsupported("send_local_metadata")

    def send_partial_agent_metadata(
        self,
        descs: RegDescs,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        raise unsupported("send_partial_agent_metadata")

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        raise unsupported("fetch_remote_metadata")

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        raise unsupported("invalidate_local_metadata")

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        raise unsupported("get_remote_descs")

    def prep_mem_view(self, dlist: Any, *, backends: Sequence[str] | None = None) -> int:
        raise unsupported("prep_mem_view")

    def release_mem_view(self, mvh: int) -> None:
        raise unsupported("release_mem_view")


def unsupported(method: str) -> nixlNotSupportedError:
    return nixlNotSupportedError(f"{method}: needs a metadata server or GPU memory views, which no backend here has")


def has(table: Mapping[str, object], backend: str) -> bool:
    if backend not in table:
        log.warning("Backend %s is not available; there is: %s", backend, ", ".join(table) or "none")
    return backend in table


def checked(value: object, kind: type[T]) -> T:
    """Raises TypeError, as NIXL does for lists of another kind and for None."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__}: must be a {kind.__name__}")
    return value


def as_name(agent: str | bytes) -> str:
    """add_remote_agent returns bytes and programs pass them on as they are."""
    return agent.decode() if isinstance(agent, bytes) else agent


def region_id(region: Region) -> tuple[MemType, int, int, int]:
    return region.mem_type, region.address, region.num_bytes, region.device


def register_all(backend: Backend, reg_descs: RegDescs) -> list[Region]:
    """All of it or, when one fails, nothing."""
    done: list[Region] = []
    try:
        for address, length, device, _ in reg_descs:
            done.append(register_one(backend, reg_descs.getType(), address, length, device))
    except BaseException:
        for region in done:
            backend.deregister(region)
        raise
    return done


def register_one(backend: Backend, mem_type: MemType, address: int, length: int, device: int) -> Region:
    if not length or address + length > 1 << 64:
        raise nixlInvalidParamError(f"{length} bytes at {address:#x}: must be at least 1 and end within 64 bits")
    return backend.register(mem_type, address, length, device)


def close_all(backends: Mapping[str, Backend]) -> None:
    for backend in backends.values():
        backend.close()
