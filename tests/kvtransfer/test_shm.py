"""What only the shm backend can get wrong: its sockets, its directory and the files it maps."""

from __future__ import annotations

import gc
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import copying
from kvtransfer import errors as e
from kvtransfer.agent import Agent, AgentConfig
from kvtransfer.backends import shm_listener
from kvtransfer.backends import shm_wire as wire
from kvtransfer.backends.shm import ShmBackend, parse_connection_info
from kvtransfer.descs import MemType, XferDescs
from kvtransfer.memory import allocate, shared_files
from tests.kvtransfer.support import PeerProcess, drain, until

SIZE = 1 << 16


def make_agent(name: str, runtime_dir: Path) -> Agent:
    agent = Agent(name, AgentConfig(backends=[]))
    agent.create_backend("shm", {"runtime_dir": str(runtime_dir), "timeout_s": "0.5"})
    return agent


@pytest.fixture
def target(runtime_dir: Path) -> Iterator[Agent]:
    agent = make_agent("target", runtime_dir)
    yield agent
    agent.close()


@pytest.fixture
def other(runtime_dir: Path) -> Iterator[Agent]:
    agent = make_agent("other", runtime_dir)
    yield agent
    agent.close()


def raw_connection(agent: Agent) -> socket.socket:
    directory, token = parse_connection_info(agent.backends["shm"].connection_info())
    sock = wire.new_socket()
    wire.SocketDir(directory).connect(sock, token)
    sock.setblocking(True)
    sock.settimeout(5)
    return sock


def hello(agent: Agent, name: object = "raw") -> bytes:
    _, token = parse_connection_info(agent.backends["shm"].connection_info())
    return wire.pack(wire.HELLO, json.dumps({"token": token, "name": name}).encode())


def hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 17) == b""
    except ConnectionResetError:  # it hung up with bytes of ours unread
        return True


# --- the listener against anything that may connect ---


@pytest.mark.parametrize(
    "message",
    [
        b"x",
        b"PDKV1",
        b"PDKV1?",
        b"\0" * 1000,
        b"x" * 150_000,
        wire.pack(wire.NOTIF, b"before hello"),
        wire.pack(wire.WELCOME, b"[]"),
        wire.pack(wire.HELLO, b"not json"),
        wire.pack(wire.HELLO, b"[]"),
        wire.pack(wire.HELLO, b'{"token": "0"}'),
        wire.pack(wire.HELLO, b"[" * 10_000),
        wire.pack(wire.HELLO, b"\xff\xfe"),
    ],
    ids=lambda m: repr(m[:24]),
)
def test_garbage_ends_that_connection_and_no_other(target: Agent, other: Agent, message: bytes) -> None:
    other.add_remote_agent(target.get_agent_metadata())
    other.make_connection("target")
    with raw_connection(target) as sock:
        sock.send(message)
        assert hung_up(sock)
    other.send_notif("target", b"still here")
    assert drain(target) == {"other": [b"still here"]}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4))
def test_random_bytes_after_a_good_start(target: Agent, messages: list[bytes]) -> None:
    with raw_connection(target) as sock:
        sock.send(hello(target))
        sock.recv(1 << 17)
        sock.send(wire.pack(wire.NOTIF, b"good"))
        try:
            for message in messages:
                sock.send(message)
        except OSError:
            pass  # it hung up in between, as it may
    assert drain(target)["raw"][0] == b"good"


@pytest.mark.parametrize("name", ["", 5, None, ["a"]])
def test_a_visitor_needs_a_name(target: Agent, name: object) -> None:
    with raw_connection(target) as sock:
        sock.send(hello(target, name))
        assert hung_up(sock)


def test_one_who_says_nothing_is_dropped_and_delays_nobody(
    target: Agent, other: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_listener, "HELLO_WITHIN_S", 0.1)
    with raw_connection(target) as silent:
        other.add_remote_agent(target.get_agent_metadata())
        other.send_notif("target", b"hi")
        assert drain(target) == {"other": [b"hi"]}
        assert hung_up(silent)


def test_descriptors_that_a_visitor_sends_are_not_kept(target: Agent) -> None:
    with raw_connection(target) as sock:
        sock.send(hello(target))
        sock.recv(1 << 17)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        read_end, write_end = os.pipe()
        socket.send_fds(sock, [wire.pack(wire.NOTIF, b"take these")], [read_end] * 20)
        os.close(read_end)
        os.close(write_end)
        assert drain(target) == {"raw": [b"take these"]}
        assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_connections_are_refused(target: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_listener, "MAX_CONNECTIONS", 2)
    with raw_connection(target) as first, raw_connection(target) as second, raw_connection(target) as third:
        for sock in (first, second):
            sock.send(hello(target))
            assert sock.recv(1 << 17).startswith(b"PDKV1W")
        assert hung_up(third)


def test_one_who_floods_is_cut_off(target: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_listener, "MAX_UNREAD_NOTIFS", 10)
    with raw_connection(target) as sock:
        sock.send(hello(target))
        sock.recv(1 << 17)
        for _ in range(11):
            sock.send(wire.pack(wire.NOTIF, b"x"))
        assert hung_up(sock)
    assert sum(map(len, target.get_new_notifs().values())) == 10


# --- a peer that lies ---


class FakeListener:
    """Answers one connection with `reply` and the given files."""

    def __init__(self, directory: Path, reply: bytes, fds: list[int]) -> None:
        self.token = "ab" * 16
        self._sock = wire.SocketDir.open(directory).listen(self.token)
        self._sock.setblocking(True)
        self._reply, self._fds = reply, fds
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._sock.accept()
        with sock:
            sock.recv(1 << 17)
            socket.send_fds(sock, [self._reply], self._fds)
        self._sock.close()

    def join(self) -> None:
        self._thread.join(5)


def unsealed_memfd(num_bytes: int) -> int:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[[1, 4096]]", "not sealed"),  # it could be shrunk under our feet
        (b"[[1, 8192]]", "4096 bytes was announced with 8192"),
        (b"[[1, -1]]", "announced"),
        (b"[[1, 4096], [2, 4096]]", "names 2 files and carries 1"),
        (b"[]", "names 0 files and carries 1"),
        (b"{}", "names 0 files"),
        (b"[1]", "cannot be used"),
        (b'[["x", 4096]]', "cannot be used"),
        (b'[[1, "x"]]', "cannot be used"),
        (b"nonsense", "cannot be used"),
    ],
)
def test_files_of_a_peer_are_checked_before_they_are_mapped(
    other: Agent, runtime_dir: Path, body: bytes, why: str
) -> None:
    fd = unsealed_memfd(4096)
    fds_before = len(os.listdir("/proc/self/fd"))
    listener = FakeListener(runtime_dir / "liar", wire.pack(wire.WELCOME, body), [fd])
    backend = other.backends["shm"]
    backend.add_peer("liar", json.dumps({"dir": str(runtime_dir / "liar"), "token": listener.token}))
    with pytest.raises(e.nixlBackendError, match=why):
        backend.connect("liar")
    listener.join()
    assert len(os.listdir("/proc/self/fd")) == fds_before
    os.close(fd)


@pytest.mark.parametrize("key", ["", "1", "x:0", "1:x", "-1:0", "99:0", "1:99999999", "1:" + "9" * 30, "1:0:0", "²:0"])
def test_a_region_that_the_peer_does_not_share(target: Agent, other: Agent, key: str) -> None:
    """Metadata is not proof: what it says is checked against the files that came."""
    memory, mine = allocate("shm", SIZE), allocate("shm", SIZE)
    target.register_memory([memory])
    other.register_memory([mine])
    good = json.loads(target.get_agent_metadata()[6:])
    good["regions"]["shm"][0][4] = key
    other.add_remote_agent(b"PDKVM1" + json.dumps(good).encode())
    near = XferDescs(MemType.DRAM_SEG, [(mine.ctypes.data, 8, 0)])
    far = XferDescs(MemType.DRAM_SEG, [(memory.ctypes.data, 8, 0)])
    with pytest.raises(e.nixlNotFoundError):
        other.transfer(other.initialize_xfer("READ", near, far, "target"))


def test_a_region_longer_than_its_file(target: Agent, other: Agent) -> None:
    memory, mine = allocate("shm", SIZE), allocate("shm", 4 * SIZE)
    target.register_memory([memory])
    other.register_memory([mine])
    content = json.loads(target.get_agent_metadata()[6:])
    content["regions"]["shm"][0][2] = 4 * SIZE
    other.add_remote_agent(b"PDKVM1" + json.dumps(content).encode())
    near = XferDescs(MemType.DRAM_SEG, [(mine.ctypes.data, 4 * SIZE, 0)])
    far = XferDescs(MemType.DRAM_SEG, [(memory.ctypes.data, 4 * SIZE, 0)])
    with pytest.raises(e.nixlNotFoundError, match="does not share"):
        other.transfer(other.initialize_xfer("READ", near, far, "target"))


def test_another_agent_behind_the_same_socket_name_is_not_taken_for_the_peer(target: Agent, other: Agent) -> None:
    directory, token = parse_connection_info(target.backends["shm"].connection_info())
    wrong = "0" * 32
    os.link(directory / f"{token}.sock", directory / f"{wrong}.sock")
    backend = other.backends["shm"]
    backend.add_peer("ghost", json.dumps({"dir": str(directory), "token": wrong}))
    with pytest.raises(e.nixlRemoteDisconnectError):
        backend.connect("ghost")
    os.unlink(directory / f"{wrong}.sock")


@pytest.mark.parametrize(
    "info", ["", "{}", "[]", "5", '{"dir": 5, "token": "00"}', '{"dir": "/x\\u0000", "token": "' + "0" * 32 + '"}']
)
def test_connection_info_is_checked(info: str) -> None:
    with pytest.raises(e.nixlMismatchError):
        parse_connection_info(info)


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
    one, two = make_agent("one", deep), make_agent("two", deep)
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
    make_agent("next", runtime_dir).close()
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
    agent = make_agent("forgotten", runtime_dir)
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
