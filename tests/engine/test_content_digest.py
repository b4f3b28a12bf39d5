"""A file is read once, and again when it changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import content_digest as module
from engine.content_digest import content_digest

CONTENT = bytes(range(200))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "f"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Grows with each file that is read; what changed just now counts as settled."""
    reads: list[Path] = []
    read = module._read

    def counted(file: Path) -> bytes:
        reads.append(file)
        return read(file)

    monkeypatch.setattr(module, "_read", counted)
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    yield reads
    forget_in_process()


def forget_in_process() -> None:
    """As if another process asked next."""
    module._remembered.cache_clear()


def change(file: Path, content: bytes) -> None:
    """In its place, at a time of its own however slowly the file system's clock ticks."""
    modified_ns = file.stat().st_mtime_ns + 1
    file.write_bytes(content)
    os.utime(file, ns=(modified_ns, modified_ns))


def test_it_is_remembered_for_other_processes(file: Path, folder: Path, reads: list[Path]) -> None:
    for _ in range(2):
        assert content_digest(file, folder) == hashlib.sha256(CONTENT).digest()
        forget_in_process()
    assert reads == [file]
    assert len(list(folder.iterdir())) == 1


def test_a_file_that_changed_is_read_again(file: Path, folder: Path, reads: list[Path]) -> None:
    content_digest(file, folder)
    change(file, CONTENT[::-1])
    for _ in range(2):
        assert content_digest(file, folder) == hashlib.sha256(CONTENT[::-1]).digest()
        forget_in_process()
    assert reads == [file, file]
    assert len(list(folder.iterdir())) == 1, "in place of what was remembered before"


def test_of_a_file_that_changed_just_now_nothing_is_remembered(
    file: Path, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        content_digest(file, folder)
    assert reads == [file, file]
    assert not folder.exists()


def test_without_a_cache_each_process_reads_once(file: Path, folder: Path, reads: list[Path]) -> None:
    folder.parent.write_bytes(b"no directory can be made here")
    for _ in range(2):
        for _ in range(2):
            assert content_digest(file, folder) == hashlib.sha256(CONTENT).digest()
        forget_in_process()
    assert reads == [file, file]


@pytest.mark.parametrize("spoilt", [b"", b"\xff\xfe", b"1 2 3 abc", b"cut"])
def test_a_spoilt_record_is_not_believed(spoilt: bytes, file: Path, folder: Path, reads: list[Path]) -> None:
    content_digest(file, folder)
    (record,) = folder.iterdir()
    record.write_bytes(record.read_bytes()[:-1] if spoilt == b"cut" else spoilt)
    forget_in_process()
    assert content_digest(file, folder) == hashlib.sha256(CONTENT).digest()
    assert reads == [file, file]
