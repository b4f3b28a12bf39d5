"""What only the shm backend can get wrong: its memory, its directory, its threads and links."""

from __future__ import annotations

import gc
import json
import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtransfer import copying
from kvtransfer import errors as e
from kvtransfer.agent import Agent
from kvtransfer.backends import shm_wire as wire
from kvtransfer.backends.shm import ShmBackend, parse_connection_info
from kvtransfer.descs import MemType, XferDescs
from kvtransfer.memory import HUGE_PAGE_BYTES, allocate, populate, shared_files
from tests.kvtransfer.support import PeerProcess, drain, shm_agent, until

SIZE = 1 << 16


# --- memory ---


def test_only_shared_memory_can_be_registered(target: Agent) -> None:
    with pytest.raises(e.nixlBackendError, match=r"allocate\('shm'"):
        target.register_memory([np.zeros(4096, np.uint8)])
    memory = allocate("shm", SIZE)
    with pytest.raises(e.nixlBackendError):
        target.register_memory([(memory.ctypes.data + 8, SIZE, 0, "")], "DRAM")
    assert json.loads(target.get_agent_metadata()[6:])["regions"] == {"shm": []}


def test_a_list_is_registered_whole_or_not_at_all(target: Agent) -> None:
    with pytest.raises(e.nixlBackendError):
        target.register_memory([allocate("shm", SIZE), np.zeros(4096, np.uint8)])
    assert json.loads(target.get_agent_metadata()[6:])["regions"] == {"shm": []}
    assert target.backends["shm"]._files() == {}  # type: ignore[attr-defined]  # nothing for peers to map


def test_shared_memory_cannot_be_shrunk() -> None:
    memory = allocate("shm", SIZE)
    span = shared_files.find(memory.ctypes.data, SIZE)
    assert span is not None
    for num_bytes in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(span.file.fd, num_bytes)


@pytest.mark.parametrize("num_bytes", [1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 4097])
def test_populating_keeps_what_is_written(num_bytes: int) -> None:
    memory = allocate("shm", num_bytes)  # a thread populates it too
    memory[:: HUGE_PAGE_BYTES // 3] = memory[-1] = 7
    written = memory.copy()
    span = shared_files.find(memory.ctypes.data, num_bytes)
    assert span is not None
    populate(span.file)
    assert np.array_equal(memory, written)


def test_the_memory_of_a_dead_peer_is_unmapped(other: Agent, runtime_dir: Path) -> None:
    """Nobody else would give it back: a pool may be half of a machine."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")

    gc.collect()  # what earlier tests left behind
    before = mappings()
    peer = PeerProcess("shm", {"runtime_dir": str(runtime_dir)}, SIZE, fill=1)
    try:
        other.add_remote_agent(peer.metadata)
        other.make_connection("peer")
        assert mappings() == before + 1
    finally:
        peer.kill()
    until(lambda: mappings() == before)


def test_a_peer_that_dies_during_the_copy(target: Agent, other: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = allocate("shm", SIZE), allocate("shm", SIZE)
    target.register_memory([far])
    other.register_memory([near])
    other.add_remote_agent(target.get_agent_metadata())
    near_descs, far_descs = (XferDescs(MemType.DRAM_SEG, [(a.ctypes.data, SIZE, 0)]) for a in (near, far))
    handle = other.initialize_xfer("READ", near_descs, far_descs, "target", b"done")
    monkeypatch.setattr(copying, "run", lambda plan, deltas: target.close())
    with pytest.raises(e.nixlRemoteDisconnectError, match="during the transfer"):
        other.transfer(handle)
    assert target.get_new_notifs() == {}


def test_arrays_keep_their_memory_alive_and_nothing_else_does() -> None:
    fds_before = len(os.listdir("/proc/self/fd"))
    view = allocate("shm", SIZE)[100:200].view(np.uint16)
    view[:] = 7
    assert int(view.sum()) == 350
    assert len(os.listdir("/proc/self/fd")) > fds_before
    del view
    until(lambda: len(os.listdir("/proc/self/fd")) == fds_before)


@pytest.mark.parametrize(("backend", "num_bytes"), [("rdma", 8), ("shm", 0), ("inproc", -1)])
def test_bad_allocations(backend: str, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        allocate(backend, num_bytes)


# --- the directory ---


def test_sockets_lie_where_only_their_user_can_go(target: Agent, runtime_dir: Path) -> None:
    directory = runtime_dir / "kv-shm"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(list(directory.glob("*.sock"))) == 1
    target.close()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o777])
def test_a_directory_open_to_others_is_refused(runtime_dir: Path, mode: int) -> None:
    (runtime_dir / "kv-shm").mkdir()
    (runtime_dir / "kv-shm").chmod(mode)
    with pytest.raises(e.nixlBackendError, match="mode 0700"):
        ShmBackend("a", {"runtime_dir": str(runtime_dir)})


def test_a_link_or_a_file_in_its_place_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "real").mkdir(mode=0o700)
    (runtime_dir / "kv-shm").symlink_to(runtime_dir / "real")
    with pytest.raises(e.nixlBackendError, match="directory"):
        ShmBackend("a", {"runtime_dir": str(runtime_dir)})
    with pytest.raises(e.nixlBackendError, match="runtime_dir"):
        ShmBackend("a", {"runtime_dir": "/proc/version"})


def test_paths_may_be_longer_than_a_socket_address(runtime_dir: Path) -> None:
    deep = runtime_dir / ("d" * 100) / ("e" * 100)
    one, two = shm_agent("one", deep), shm_agent("two", deep)
    try:
        one.add_remote_agent(two.get_agent_metadata())
        one.send_notif("two", b"hi")
        assert drain(two) == {"one": [b"hi"]}
    finally:
        one.close()
        two.close()


def test_what_a_killed_agent_left_is_swept(target: Agent, runtime_dir: Path) -> None:
    peer = PeerProcess("shm", {"runtime_dir": str(runtime_dir)}, SIZE, fill=1)
    directory = runtime_dir / "kv-shm"
    peer.kill()
    stale = directory / f".{'0' * 32}.1234"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(stale))  # killed between bind and rename
    os.utime(stale, (1, 1))
    assert len(list(directory.iterdir())) == 3
    shm_agent("next", runtime_dir).close()
    _, token = parse_connection_info(target.backends["shm"].connection_info())
    assert [p.name for p in directory.iterdir()] == [f"{token}.sock"]


@pytest.mark.parametrize("timeout_s", ["0", "-1", "nan", "x", "inf", "99999"])
def test_bad_timeouts(runtime_dir: Path, timeout_s: str) -> None:
    with pytest.raises(e.nixlInvalidParamError, match="timeout_s"):
        ShmBackend("a", {"runtime_dir": str(runtime_dir), "timeout_s": timeout_s})


# --- threads and ends ---


def test_many_threads_share_one_link(target: Agent, other: Agent) -> None:
    far, near = allocate("shm", SIZE), allocate("shm", SIZE)
    far[:] = np.arange(SIZE) // 256
    target.register_memory([far])
    other.register_memory([near])
    other.add_remote_agent(target.get_agent_metadata())

    def move(i: int) -> None:
        near_descs = XferDescs(MemType.DRAM_SEG, [(near.ctypes.data + i * 256, 256, 0)])
        far_descs = XferDescs(MemType.DRAM_SEG, [(far.ctypes.data + i * 256, 256, 0)])
        other.transfer(other.initialize_xfer("READ", near_descs, far_descs, "target", b"%d" % i))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(move, range(256)))
    assert np.array_equal(near, far)
    assert sorted(int(m) for m in drain(target, 256)["other"]) == list(range(256))
    assert len(target.backends["shm"]._listener._visitors) == 1  # type: ignore[attr-defined]  # one link, not eight


def test_an_agent_that_is_forgotten_ends(runtime_dir: Path) -> None:
    threads_before = threading.active_count()
    agent = shm_agent("forgotten", runtime_dir)
    assert len(list((runtime_dir / "kv-shm").glob("*.sock"))) == 1
    del agent
    assert list((runtime_dir / "kv-shm").iterdir()) == []
    until(lambda: threading.active_count() == threads_before)


def test_closing_twice(target: Agent) -> None:
    target.close()
    target.close()
    target.backends["shm"].close()


def test_notifications_have_a_greatest_size(target: Agent, other: Agent) -> None:
    other.add_remote_agent(target.get_agent_metadata())
    other.send_notif("target", b"x" * wire.MAX_NOTIF_BYTES)
    with pytest.raises(e.nixlInvalidParamError, match="at most 65536"):
        other.send_notif("target", b"x" * (wire.MAX_NOTIF_BYTES + 1))
    assert len(drain(target)["other"][0]) == wire.MAX_NOTIF_BYTES
