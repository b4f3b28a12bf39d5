"""The writer of safetensors files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.safetensors_file import Layout, to_bfloat16, write_tensors


def test_bfloat16_rounds_as_torch_does() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 10.0
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 0.0, -0.0, 1e-40])
    both = torch.cat([values, ties])
    expected = both.bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(both.numpy()), expected)


def test_a_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7.5], np.float32)}
    done: list[tuple[int, int]] = []
    file = tmp_path / "x.safetensors"
    write_tensors(file, {k: ("BF16", v.shape) for k, v in tensors.items()}, tensors.items(), lambda *d: done.append(d))
    loaded = load_file(file)
    assert {k: v.float().tolist() for k, v in loaded.items()} == {k: v.tolist() for k, v in tensors.items()}
    assert done == [(12, 14), (14, 14)]
    assert file.stat().st_size % 64 == 14


def test_writing_other_tensors_than_announced_is_an_error(tmp_path: Path) -> None:
    values, square = np.zeros((2, 2), np.float32), ("BF16", (2, 2))
    layouts: list[Layout] = [
        {"b": square},
        {"a": ("BF16", (4,))},
        {"a": ("U8", (2, 2))},
        {"a": square, "b": square},
        {},
    ]
    for layout in layouts:
        with pytest.raises(ValueError, match=r"expected|were given"):
            write_tensors(tmp_path / "x", layout, [("a", values)], lambda *_: None)
