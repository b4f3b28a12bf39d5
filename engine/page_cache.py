"""Files in the page cache in pages of 2 MB: one that is mapped then needs no entry of a page table for every 4 KB.

Linux keeps a file in pieces as large as those in which it was read or written (ext4 since 6.16, XFS and Btrfs before
that), and maps pieces of 2 MB as huge pages, shared like any others. All here is best effort: a file is the same
without it.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

POPULATE_CHUNK_BYTES = 32 << 20  # a call, in which no other thread runs Python
MADV_POPULATE_READ = 22  # Linux 5.14

_log = logging.getLogger(__name__)


def fetch(file: Path) -> None:
    """Reads what is not in the cache yet, in huge pages. Raises OSError when `file` cannot be opened."""
    with file.open("rb") as f:
        num_bytes = os.fstat(f.fileno()).st_size
        if num_bytes == 0:
            return
        with mmap.mmap(f.fileno(), num_bytes, access=mmap.ACCESS_READ) as mapping:
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
                for begin in range(0, num_bytes, POPULATE_CHUNK_BYTES):
                    mapping.madvise(MADV_POPULATE_READ, begin, min(POPULATE_CHUNK_BYTES, num_bytes - begin))
            except OSError as error:
                _log.debug("%s is not fetched in huge pages: %s", file, error)


def fetch_again(file: Path) -> None:
    """The same for a file that was just written, hence in smaller pieces: they are dropped first, once on the disk.

    Raises OSError when `file` cannot be opened.
    """
    with file.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    fetch(file)
