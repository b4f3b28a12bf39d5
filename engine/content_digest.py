"""SHA-256 of whole files, remembered by what the file system says of each: one that has not changed is read once.

    <folder>/<device>-<inode>    size, times of change and digest of the file that lies in this place

A file system's clock ticks every few milliseconds, on some every second or two: of a file that changed a moment ago
nothing is remembered, as it may change again within the tick. What a disk lost since is not seen.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

SETTLED_NS = 2_000_000_000  # FAT's tick, the longest

_log = logging.getLogger(__name__)


class _State(NamedTuple):
    """Another whenever a file's bytes are written, or another file takes its place."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # the system's own: no program can set it

    @classmethod
    def of(cls, file: Path) -> _State:
        stat = file.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def content_digest(file: Path, folder: Path) -> bytes:
    """32 bytes over all of `file`, remembered in `folder`: where that cannot be written, by this process alone.

    Any thread may call it, and no other is held up: 0.15 s for 269 MB. Raises OSError when `file` cannot be read.
    """
    state = _State.of(file)  # before it is read: what changes meanwhile has another
    if time.time_ns() - state.changed_ns < SETTLED_NS:
        return _read(file)
    return _remembered(file, state, folder)


@lru_cache(maxsize=1024)
def _remembered(file: Path, state: _State, folder: Path) -> bytes:
    record = folder / f"{state.device}-{state.inode}"
    known = " ".join(map(str, state[2:]))
    with suppress(OSError, ValueError):
        before, _, digest = record.read_text().rpartition(" ")
        if before == known and len(digest) == 2 * hashlib.sha256().digest_size:
            return bytes.fromhex(digest)
    content = _read(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = record.with_name(f".{record.name}.{os.getpid()}")
        unfinished.write_text(f"{known} {content.hex()}")
        unfinished.rename(record)
    except OSError as error:
        _log.info("the digest of %s cannot be kept in %s: %s. The next start reads it again.", file, folder, error)
    return content


def _read(file: Path) -> bytes:
    with file.open("rb", buffering=0) as f:
        return hashlib.file_digest(f, "sha256").digest()
