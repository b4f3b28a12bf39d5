"""Fixtures of several files here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.engine.tiny_llama import OurModel, make_checkpoint, scheduled


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random tensors are the same whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def empty_cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted or quantised goes to a cache of the test's own."""
    folder = tmp_path_factory.mktemp("loaded")
    make_checkpoint(folder)
    OurModel(folder).logits(scheduled([1], 0, [0]))  # loads the compiled kernels while their cache is the user's own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def float_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer weights meet x as it is, in torch.

    Rounding x to 8 bits moves the logits of a random model further than wrong weights may.
    """
    monkeypatch.setattr("kernels.reference.linear.rounded", lambda x: x.float())
    for module in ("linear", "decoder"):
        monkeypatch.setattr(f"kernels.cpu.{module}.runs_in_cpp", lambda _weights: False)


@pytest.fixture
def user_cache(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, `tiny_dir` having loaded the kernels from the user's own."""
    OurModel(tiny_dir).logits(scheduled([1], 0, [0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    make_checkpoint(folder)
    return folder


@pytest.fixture
def copied(tiny_dir: Path, tmp_path: Path) -> Path:
    """A tiny checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "tiny-llama"))
