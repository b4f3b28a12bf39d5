"""Fixtures of several files here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_llama import OurModel, make_checkpoint, scheduled


@pytest.fixture
def empty_cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted or quantised goes to a cache of the test's own."""
    folder = tmp_path_factory.mktemp("loaded")
    make_checkpoint(folder)
    OurModel(folder).logits(scheduled([1], 0, [0]))  # loads the compiled kernels while their cache is the user's own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
