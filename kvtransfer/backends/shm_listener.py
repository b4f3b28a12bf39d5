"""The listening side of the shm backend: one thread that hands out memfds and collects notifications.

Peers may be killed, stopped or confused at any moment. Nothing here blocks on one of them: sockets do not wait, a
connection that does not introduce itself in time is closed, and so is one that sends anything unexpected.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvtransfer.backends import shm_wire as wire
from kvtransfer.backends.shm_link import Link
from kvtransfer.memory import SharedFile

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 5.0
MAX_CONNECTIONS = 1024
MAX_UNREAD_NOTIFS = 1 << 16
CLOSE_WITHIN_S = 5.0


@dataclass(slots=True, eq=False)
class Visitor:
    """An accepted connection; without a name until its HELLO."""

    sock: socket.socket
    deadline: float
    name: str | None = None


class Listener:
    """`files` says which memfds peers may have. `watch` adds a link of ours whose death is to be noticed."""

    def __init__(self, sock: socket.socket, token: str, files: Callable[[], Mapping[int, SharedFile]]) -> None:
        self._sock = sock
        self._token = token
        self._files = files
        self._visitors: set[Visitor] = set()
        self._notifs: deque[tuple[str, bytes]] = deque()
        self._to_watch: deque[tuple[Link, Callable[[], None]]] = deque()
        self._watched: set[Link] = set()
        self._lock = threading.Lock()  # guards `_stopping`: the eventfd is open while it is not set
        self._stopping = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wake)
        self._thread = threading.Thread(target=self._run, name="kv-shm-listener", daemon=True)
        self._thread.start()

    def take_notifs(self) -> list[tuple[str, bytes]]:
        taken = []
        while self._notifs:
            taken.append(self._notifs.popleft())
        return taken

    def add_notif(self, name: str, message: bytes) -> None:
        self._notifs.append((name, message))

    def watch(self, link: Link, on_death: Callable[[], None]) -> None:
        """Calls `on_death` on the listener's thread once `link`'s peer is gone."""
        with self._lock:
            if self._stopping:
                link.close()
                return
            self._to_watch.append((link, on_death))
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Call once."""
        with self._lock:
            self._stopping = True
            os.eventfd_write(self._wakeup, 1)
        if self._thread is not threading.current_thread():  # where the garbage collector may run, too
            self._thread.join(CLOSE_WITHIN_S)

    # --- everything below runs on the listener's thread ---

    def _run(self) -> None:
        while not self._stopping:
            self._handle_events()
            self._drop_silent()
        self._close_all()

    def _handle_events(self) -> None:
        """A function of its own, so that no variable holds on to the last event's link, and its mappings, meanwhile."""
        for key, _ in self._selector.select(self._timeout_s()):
            key.data()

    def _close_all(self) -> None:
        for visitor in list(self._visitors):
            self._drop(visitor)
        for link in [*self._watched, *(link for link, _ in self._to_watch)]:
            link.close()
        self._selector.close()
        self._sock.close()
        with self._lock:
            os.close(self._wakeup)

    def _timeout_s(self) -> float | None:
        return 1.0 if any(v.name is None for v in self._visitors) else None

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for visitor in [v for v in self._visitors if v.name is None and v.deadline <= now]:
            self._drop(visitor, "it did not introduce itself")

    def _wake(self) -> None:
        os.eventfd_read(self._wakeup)
        while self._to_watch:
            link, on_death = self._to_watch.popleft()
            if link.register(self._selector, partial(self._link_event, link, on_death)):
                self._watched.add(link)
            else:
                on_death()

    def _link_event(self, link: Link, on_death: Callable[[], None]) -> None:
        """A peer says nothing on a link once it is up: whatever arrives is its end."""
        self._watched.discard(link)
        link.close(self._selector)
        on_death()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:  # the peer gave up already, or we are out of file descriptors
            log.warning("accept: %s", error)
            return
        sock.setblocking(False)
        if len(self._visitors) >= MAX_CONNECTIONS or not wire.same_user(sock):
            log.warning("a connection was refused: too many (%d), or of another user", len(self._visitors))
            sock.close()
            return
        visitor = Visitor(sock, time.monotonic() + HELLO_WITHIN_S)
        self._visitors.add(visitor)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, visitor))

    def _read(self, visitor: Visitor) -> None:
        try:
            message = visitor.sock.recv(wire.MAX_MESSAGE_BYTES + 1)
            if not message:
                self._drop(visitor)
                return
            self._handle(visitor, *wire.unpack(message))
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a visitor causes ends that visitor and nothing else
            self._drop(visitor, f"{type(error).__name__}: {error}")

    def _handle(self, visitor: Visitor, kind: bytes, body: bytes) -> None:
        """Raises ValueError for a message that has no place here."""
        if visitor.name is None and kind == wire.HELLO:
            visitor.name = self._checked_name(body)
            self._welcome(visitor.sock)
        elif visitor.name is not None and kind == wire.NOTIF:
            if len(self._notifs) >= MAX_UNREAD_NOTIFS:
                raise ValueError(f"{MAX_UNREAD_NOTIFS} notifications are unread")
            self._notifs.append((visitor.name, body))
        else:
            raise ValueError(f"message {kind!r} is out of place")

    def _checked_name(self, body: bytes) -> str:
        content = json.loads(body)
        if not isinstance(content, dict) or content.get("token") != self._token:
            raise ValueError("it looks for another agent")
        name = content.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"its name is {name!r}")
        return name

    def _welcome(self, sock: socket.socket) -> None:
        files = self._files()
        body = json.dumps([[file_id, len(file)] for file_id, file in files.items()]).encode()
        fds = [file.fd for file in files.values()]
        socket.send_fds(sock, [wire.pack(wire.WELCOME, body)], fds)

    def _drop(self, visitor: Visitor, why: str = "") -> None:
        if why:
            log.warning("connection of %s closed: %s", visitor.name or "an unknown peer", why)
        self._visitors.discard(visitor)
        self._selector.unregister(visitor.sock)
        visitor.sock.close()
