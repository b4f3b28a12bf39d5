"""A file is the same whichever pages it is in, and stays usable where the kernel knows no huge ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine import page_cache
from engine.page_cache import POPULATE_CHUNK_BYTES, fetch, fetch_again

each_way = pytest.mark.parametrize("bring_in", [fetch, fetch_again])


@each_way
@pytest.mark.parametrize("size", [0, 1, 4096, (2 << 20) + 1, POPULATE_CHUNK_BYTES + 5])
def test_a_file_keeps_what_it_holds(bring_in: Callable[[Path], None], size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).bytes(size)
    file = tmp_path / "f"
    file.write_bytes(content)
    bring_in(file)
    assert file.read_bytes() == content


@each_way
def test_an_unknown_advice_is_no_error(
    bring_in: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "MADV_POPULATE_READ", 9999)
    file = tmp_path / "f"
    file.write_bytes(b"content")
    bring_in(file)
    assert file.read_bytes() == b"content"


@each_way
def test_a_missing_file_is_an_error(bring_in: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bring_in(tmp_path / "missing")
