"""The connecting side of the shm backend: a link to one peer, with the peer's memory mapped here."""

from __future__ import annotations

import fcntl
import json
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvtransfer.backends import shm_wire as wire
from kvtransfer.backends.base import Region
from kvtransfer.errors import nixlBackendError, nixlNotFoundError, nixlRemoteDisconnectError
from kvtransfer.memory import SharedFile, populate

RETRY_S = 0.002
MAX_FILE_BYTES = 1 << 46


class Link:
    """Made by `attach`. Copies keep the mappings alive that they use, so closing a link never pulls memory away."""

    def __init__(self, name: str, sock: socket.socket, files: Mapping[int, SharedFile]) -> None:
        self.name = name
        self.files = files
        self._sock = sock
        self._lock = threading.Lock()  # a closed descriptor's number may be reused while another thread sends
        self._closed = False

    def address_of(self, region: Region) -> int:
        """Where the peer's region is mapped here. Raises nixlNotFoundError when it lies in none of the files."""
        file_id, offset = parse_key(region.key)
        file = self.files.get(file_id)
        if file is None or offset > len(file) - region.num_bytes:
            raise nixlNotFoundError(
                f"peer {self.name!r} does not share region {region.key!r} of {region.num_bytes} bytes"
            )
        return file.address + offset

    def has(self, region: Region) -> bool:
        return parse_key(region.key)[0] in self.files

    def alive(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            try:
                return self._sock.recv(1, socket.MSG_PEEK) != b""
            except BlockingIOError:
                return True
            except OSError:
                return False

    def send(self, message: bytes, timeout_s: float) -> None:
        """Raises nixlRemoteDisconnectError, and nixlBackendError when the peer reads nothing for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._try_send(message):
            if time.monotonic() >= deadline:
                raise nixlBackendError(f"peer {self.name!r} took no message for {timeout_s} s")
            time.sleep(RETRY_S)

    def _try_send(self, message: bytes) -> bool:
        with self._lock:
            try:
                if not self._closed:
                    self._sock.send(message)
                    return True
            except BlockingIOError:
                return False
            except OSError:
                pass  # reported below
        raise nixlRemoteDisconnectError(f"peer {self.name!r} is gone")

    def register(self, selector: selectors.BaseSelector, callback: Callable[[], None]) -> bool:
        """False when the link is closed already."""
        with self._lock:
            if not self._closed:
                selector.register(self._sock, selectors.EVENT_READ, callback)
            return not self._closed

    def shutdown(self) -> None:
        """Ends the link from any thread; the listener, which watches it, then closes it."""
        with self._lock, suppress(OSError):
            if not self._closed:
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self, selector: selectors.BaseSelector | None = None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if selector is not None:
                selector.unregister(self._sock)
            self._sock.close()


def make_key(file_id: int, offset: int) -> str:
    return f"{file_id}:{offset}"


def parse_key(key: str) -> tuple[int, int]:
    """(file id, offset) of a region. Raises nixlNotFoundError for what `make_key` did not write."""
    file_id, _, offset = key.partition(":")
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in (file_id, offset)):
        raise nixlNotFoundError(f"region key {key!r} is not of the shm backend")
    return int(file_id), int(offset)


def attach(name: str, directory: wire.SocketDir, token: str, own_name: str, timeout_s: float) -> Link:
    """Connects, introduces us and maps what the peer shares. Raises nixlRemoteDisconnectError, nixlBackendError."""
    deadline = time.monotonic() + timeout_s
    sock = wire.new_socket()
    try:
        _connect(sock, name, directory, token, deadline)
        hello = json.dumps({"token": token, "name": own_name}).encode()
        sock.send(wire.pack(wire.HELLO, hello))
        return Link(name, sock, _receive_files(sock, name, deadline))
    except OSError as error:
        sock.close()
        raise nixlRemoteDisconnectError(f"peer {name!r} is gone: {error.strerror}") from None
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, name: str, directory: wire.SocketDir, token: str, deadline: float) -> None:
    while True:
        try:
            directory.connect(sock, token)
            break
        except BlockingIOError:  # its queue of connections is full
            if time.monotonic() >= deadline:
                raise nixlBackendError(f"peer {name!r} accepts no connection") from None
            time.sleep(RETRY_S)
    if not wire.same_user(sock):
        raise nixlBackendError(f"peer {name!r} runs as another user")


def _receive_files(sock: socket.socket, name: str, deadline: float) -> dict[int, SharedFile]:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise nixlBackendError(f"peer {name!r} does not answer")
    message, fds, _, _ = socket.recv_fds(sock, wire.MAX_MESSAGE_BYTES, wire.MAX_FILES, socket.MSG_CMSG_CLOEXEC)
    if not message:
        raise nixlRemoteDisconnectError(f"peer {name!r} is gone: another agent listens there, or none")
    try:
        return _map_files(message, fds)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise nixlBackendError(f"peer {name!r} answered what cannot be used: {error}") from None
    finally:
        for fd in fds:  # those that could not be mapped
            os.close(fd)


def _map_files(message: bytes, fds: list[int]) -> dict[int, SharedFile]:
    """Takes each fd out of `fds` that it maps. Raises ValueError, TypeError, OSError."""
    kind, body = wire.unpack(message)
    entries = json.loads(body)
    if kind != wire.WELCOME or len(entries) != len(fds):
        raise ValueError(f"message {kind!r} names {len(entries)} files and carries {len(fds)}")
    files = {}
    for file_id, num_bytes in entries:
        _check_file(fds[0], num_bytes)
        files[int(file_id)] = SharedFile.open(fds[0], num_bytes, int(file_id))
        del fds[0]
    for file in files.values():
        threading.Thread(target=populate, args=(file,), name="kv-populate", daemon=True).start()
    return files


def _check_file(fd: int, num_bytes: int) -> None:
    """It must be as long as said and sealed, or reading it could kill this process. Raises ValueError."""
    if not 0 < num_bytes <= MAX_FILE_BYTES or os.fstat(fd).st_size != num_bytes:
        raise ValueError(f"a file of {os.fstat(fd).st_size} bytes was announced with {num_bytes}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ValueError("a file is no memfd") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("a file is not sealed against shrinking")
