"""The tensors of a checkpoint's directory by name, as views of its mapped files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.config_fields import CheckpointError
from engine.safetensors_file import TensorEntry, read_header, shard_files


class StoredTensors:
    """`entries`: what is stored, by name. A file is mapped once, when the first of its tensors is wanted.

    Raises CheckpointError for files that are missing, cut short or malformed.
    """

    def __init__(self, model_dir: Path) -> None:
        headers = {file: read_header(file) for file in shard_files(model_dir)}
        self.model_dir = model_dir
        self.entries: Mapping[str, TensorEntry] = {name: e for header in headers.values() for name, e in header.items()}
        self._files = {name: file for file, header in headers.items() for name in header}
        self._opened: dict[Path, Any] = {}

    def file(self, name: str) -> Path:
        """Where it is stored. KeyError: nowhere."""
        return self._files[name]

    def tensor(self, name: str) -> torch.Tensor:
        """A view. KeyError: it is not stored."""
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = opened(file)
        tensor: torch.Tensor = self._opened[file].get_tensor(name)
        return tensor


def opened(file: Path) -> Any:
    """The mapped `file`. Raises CheckpointError."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}: copy it again") from None
