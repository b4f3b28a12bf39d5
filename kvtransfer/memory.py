"""Memory that can be registered with a backend.

Memory for the `shm` backend is a sealed memfd: a file without a name, which a peer maps after it got its descriptor
over a socket. The kernel frees it with the last process that maps it, so a `kill -9` leaks nothing, and its seal keeps
a peer from shrinking it under our feet (which would be a SIGBUS here).

Touching cold pages costs about a second a GiB. A thread populates them in the background, so a pool is usable at once
and fast soon after. Where it can, it makes pages of 2 MB, which takes a tenth of that: attention reads blocks that lie
far apart, and each in a page of 4 KB costs a walk through page tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

BACKENDS = ("inproc", "shm")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
POPULATE_CHUNK_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; maps pages writable without changing what they hold
MADV_COLLAPSE = 25  # Linux 6.1; makes huge pages, whatever the system's defaults for shared memory are

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedFile(mmap.mmap):
    """A mapped memfd. It is unmapped, and its descriptor closed, when the last array over it is gone."""

    fd: int
    file_id: int
    address: int

    @classmethod
    def open(cls, fd: int, num_bytes: int, file_id: int) -> SharedFile:
        """Maps `num_bytes` of `fd` and owns `fd` from then on."""
        mapping = cls(fd, num_bytes, flags=mmap.MAP_SHARED)
        mapping.fd, mapping.file_id, mapping.address = fd, file_id, 0
        mapping.address = as_bytes(mapping).ctypes.data
        weakref.finalize(mapping, os.close, fd)
        return mapping


@dataclass(frozen=True, slots=True)
class SharedSpan:
    """Where a piece of our memory lies in one of our memfds."""

    file: SharedFile
    offset: int


class SharedFiles:
    """All memfds of this process by address: a mirror of the address space, hence one a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: weakref.WeakValueDictionary[int, SharedFile] = weakref.WeakValueDictionary()
        self._next_id = 0

    def create(self, num_bytes: int) -> SharedFile:
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with self._lock, _room_above_aligned(fd, num_bytes):
            self._next_id += 1
            file = SharedFile.open(fd, num_bytes, self._next_id)
            self._files[file.address] = file
        return file

    def find(self, address: int, num_bytes: int) -> SharedSpan | None:
        """The span that holds all of [address, address + num_bytes), or None."""
        with self._lock:
            files = list(self._files.values())
        for file in files:
            offset = address - file.address
            if 0 <= offset <= len(file) - num_bytes:
                return SharedSpan(file, offset)
        return None


@contextlib.contextmanager
def _room_above_aligned(fd: int, num_bytes: int) -> Iterator[None]:
    """Meanwhile a mapping of `fd` begins where huge pages can: Linux puts it right below the last one that is as large.

    Best effort: it may find room elsewhere.
    """
    with mmap.mmap(fd, num_bytes) as probe:
        address = ctypes.addressof(ctypes.c_char.from_buffer(probe))
    if num_bytes < HUGE_PAGE_BYTES or address % HUGE_PAGE_BYTES == 0:
        yield
        return
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    size += (address - size) % HUGE_PAGE_BYTES
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ):
        yield


shared_files = SharedFiles()


def allocate(backend: str, num_bytes: int) -> Bytes:
    """`num_bytes` zeroes as a flat array that `backend` can register, from the beginning of a page on.

    Raises ValueError, and OSError without memory.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
    if num_bytes < 1:
        raise ValueError(f"num_bytes = {num_bytes}: must be at least 1")
    if backend == "inproc":
        return as_bytes(mmap.mmap(-1, num_bytes))
    file = shared_files.create(num_bytes)
    threading.Thread(target=populate, args=(file,), name="kv-populate", daemon=True).start()
    return as_bytes(file)


def as_bytes(mapping: mmap.mmap) -> Bytes:
    """A writable view of all of `mapping`, which it keeps alive."""
    return np.frombuffer(mapping, np.uint8)


def populate(file: SharedFile) -> None:
    """Maps all pages, a chunk a call and without the GIL. Best effort: an older kernel populates on first touch."""
    for offset in range(0, len(file), POPULATE_CHUNK_BYTES):
        num_bytes = min(POPULATE_CHUNK_BYTES, len(file) - offset)
        _make_huge_pages(file.address + offset, num_bytes)
        if _libc.madvise(file.address + offset, num_bytes, MADV_POPULATE_WRITE):
            log.debug("populate: %s", os.strerror(ctypes.get_errno()))
            return


def _make_huge_pages(address: int, num_bytes: int) -> None:
    """Where whole ones fit. Each is made of its first small page, the others being zeroes that nobody has touched."""
    whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if address % HUGE_PAGE_BYTES or not whole:
        return
    for page in range(address, address + whole, HUGE_PAGE_BYTES):
        _libc.madvise(page, mmap.PAGESIZE, MADV_POPULATE_WRITE)
    if _libc.madvise(address, whole, MADV_COLLAPSE):
        log.debug("no huge pages: %s", os.strerror(ctypes.get_errno()))
