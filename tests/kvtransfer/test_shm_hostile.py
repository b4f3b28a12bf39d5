"""The shm backend against visitors that send anything and peers that lie."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import errors as e
from kvtransfer.agent import Agent
from kvtransfer.backends import shm_listener
from kvtransfer.backends import shm_wire as wire
from kvtransfer.backends.shm import parse_connection_info
from kvtransfer.descs import MemType, XferDescs
from kvtransfer.memory import allocate
from tests.kvtransfer.support import drain

SIZE = 1 << 16


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


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
