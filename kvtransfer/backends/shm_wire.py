"""Sockets and messages of the shm backend.

Each agent listens on a UNIX socket named after its token, in a directory that only its user can enter. SEQPACKET keeps
messages whole: a send that times out leaves no half message behind. One connection carries, from the one who connects:

    HELLO {"token": whom it expects, "name": who it is}   answered by
    WELCOME [[file id, bytes], ...]                       with the memfds as ancillary data, in the same order
    NOTIF message                                         any number of them

Then its end of file says that the peer died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.errors import nixlBackendError

HELLO, WELCOME, NOTIF = b"H", b"W", b"N"
_MAGIC = b"PDKV1"
HEADER_BYTES = len(_MAGIC) + 1
MAX_NOTIF_BYTES = 64 << 10
MAX_MESSAGE_BYTES = HEADER_BYTES + MAX_NOTIF_BYTES
MAX_FILES = 128  # file descriptors in one message; the kernel allows 253
STALE_AFTER_S = 60.0


def pack(kind: bytes, body: bytes) -> bytes:
    return _MAGIC + kind + body


def unpack(message: bytes) -> tuple[bytes, bytes]:
    """(kind, body). Raises ValueError for anything else than a message of ours."""
    kind = message[len(_MAGIC) : HEADER_BYTES]
    if not message.startswith(_MAGIC) or kind not in (HELLO, WELCOME, NOTIF) or len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(message)} bytes that start with {message[:8]!r} are no message of this protocol")
    return kind, message[HEADER_BYTES:]


def same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


@dataclass(frozen=True, slots=True)
class SocketDir:
    """A directory of sockets that belongs to this user alone, or an error."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> SocketDir:
        """Creates it with mode 0700 where needed. Raises nixlBackendError when others could enter it."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
        except OSError as error:
            raise nixlBackendError(f"runtime_dir {path}: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise nixlBackendError(f"runtime_dir {path}: must be a directory of uid {os.geteuid()} with mode 0700")
        return cls(path)

    def listen(self, token: str) -> socket.socket:
        """Binds, listens and only then takes the final name, so that a socket with that name always answers."""
        sock = new_socket()
        temporary = f".{token}.{secrets.token_hex(4)}"
        try:
            with self._short(temporary) as name:
                sock.bind(name)
            sock.listen(128)
            (self.path / temporary).rename(self.socket_path(token))
        except OSError as error:
            sock.close()
            raise nixlBackendError(f"cannot listen in {self.path}: {error.strerror}") from None
        return sock

    def connect(self, sock: socket.socket, token: str) -> None:
        """Raises OSError; BlockingIOError while the listener's queue is full."""
        with self._short(f"{token}.sock") as name:
            sock.connect(name)

    def socket_path(self, token: str) -> Path:
        return self.path / f"{token}.sock"

    @contextlib.contextmanager
    def _short(self, name: str) -> Iterator[str]:
        """A name for the socket API, which takes 107 bytes only, however long our path is."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/{name}"
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Removes sockets that killed agents left behind: nobody answers there any more."""
        for path in self.path.iterdir():
            if path.suffix == ".sock" or (path.name.startswith(".") and _age_s(path) > STALE_AFTER_S):
                self._remove_if_dead(path)

    def _remove_if_dead(self, path: Path) -> None:
        sock = new_socket()
        try:
            with self._short(path.name) as name:
                sock.connect(name)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # gone already, or alive with a full queue
        finally:
            sock.close()


def _age_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime
    return 0.0
