"""A byte that changed, anywhere, is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import checksum
from engine.checksum import SIZE_BYTES, has_checksum, write_checksum

CONTENT = bytes(range(200))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With its checksum, and longer than what is read at once."""
    monkeypatch.setattr(checksum, "_BUFFER_BYTES", 64)
    file = tmp_path / "f"
    file.write_bytes(CONTENT + bytes(SIZE_BYTES))
    write_checksum(file)
    return file


def test_only_the_last_bytes_are_written(file: Path) -> None:
    assert file.read_bytes()[:-SIZE_BYTES] == CONTENT
    assert has_checksum(file)


def test_any_flipped_bit_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            file.write_bytes(changed)
            assert not has_checksum(file)


@pytest.mark.parametrize("size", [0, 3, SIZE_BYTES, 64, 203])
def test_a_file_that_was_cut_short_has_none(size: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:size])
    assert not has_checksum(file)


def test_zeros_have_none(file: Path) -> None:
    """As after a crash that kept a file's length and lost what was in it."""
    file.write_bytes(bytes(len(CONTENT) + SIZE_BYTES))
    assert not has_checksum(file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        has_checksum(tmp_path / "none")
