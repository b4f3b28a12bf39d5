"""Quantised weights in the order in which they are multiplied, made once and mapped by all pods of a host.

    <XDG_CACHE_HOME or ~/.cache>/pdserve/quantized/<model>-<weights revision>-<quantization>-<version>.safetensors

For a linear `x`: x.packed, x.row_scales, x.scales and x.offsets, as kernels/quantized.py has them. A file appears whole
or not at all: it is written under another name, under a lock, and renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from engine.checkpoint import cache_dir, locked, model_name, weights_revision
from engine.config_fields import CheckpointError
from engine.model_config import ModelConfig
from engine.quantization import QUANTIZER_VERSION, StoredQuantization
from engine.quantize import quantize_int4, quantize_int8
from engine.safetensors_file import read_header, shard_files, write_tensors
from engine.stored_quantization import read_stored, stored_names
from kernels.quantized import QuantizedMatrix

HEAD = "lm_head"
_EMBEDDING = "model.embed_tokens.weight"
_DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16", torch.float32: "F32"}
_FIELDS = ("packed", "row_scales", "scales", "offsets")


def quantized_file(model_dir: Path, config: ModelConfig, quantization: str) -> Path | None:
    """The file with `model_dir`'s quantised linears, made now when it is not there; None: it has none.

    `quantization` has been checked against `config`. Raises CheckpointError.
    """
    kind = config.quantization.method if config.quantization else quantization
    if kind == "none":
        return None
    key = f"{model_name(model_dir)}-{weights_revision(model_dir)}-{kind}-{QUANTIZER_VERSION}"
    target = cache_dir().parent / "quantized" / f"{key}.safetensors"
    try:
        if not _is_whole(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(target.with_name(f".{key}.lock")):
                if not _is_whole(target):  # another process may have made it while we waited
                    _make(model_dir, config, quantization, target)
    except OSError as error:
        raise CheckpointError(f"cannot write the quantised weights of {model_dir} to {target}: {error}") from error
    return target


def _is_whole(file: Path) -> bool:
    """A file that was cut short later is none: it is made anew."""
    try:
        read_header(file)
    except (FileNotFoundError, CheckpointError):
        return False
    return True


class QuantizedFile:
    """The linears of a mapped file, by name without suffix."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._shapes = {name: entry.shape for name, entry in read_header(file).items()}
        self._opened: Any = safe_open(file, framework="pt")

    def __contains__(self, name: str) -> bool:
        return f"{name}.packed" in self._shapes

    def matrix(self, name: str, shape: tuple[int, int]) -> QuantizedMatrix:
        """Views of the file. Raises CheckpointError when it is not of `shape`."""
        tensors = {
            field: self._opened.get_tensor(f"{name}.{field}") for field in _FIELDS if f"{name}.{field}" in self._shapes
        }
        try:
            return QuantizedMatrix(*shape, **tensors)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._file}: {name}: {error}; config.json calls for {shape}") from None


def _make(model_dir: Path, config: ModelConfig, quantization: str, target: Path) -> None:
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        source = _Checkpoint(model_dir)
        stored = config.quantization
        linears = _stored(source, stored) if stored else _rounded(source, quantization, config.tie_word_embeddings)
        tensors = {f"{name}.{field}": t for name, matrix in linears for field, t in _fields_of(matrix)}
        order = sorted(tensors, key=lambda name: not name.endswith(".packed"))  # their sizes keep cache lines whole
        layout = {name: (_DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in order}
        write_tensors(unfinished, layout, ((name, _array(tensors[name])) for name in order), lambda _done, _of: None)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _rounded(source: _Checkpoint, quantization: str, tied: bool) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Linears of the layers in `quantization`, the head in 8 bits: it is the most sensitive, and large in small models.

    An expert layer's router keeps its precision.
    """
    quantize = quantize_int8 if quantization == "int8" else quantize_int4
    names = [n for n in source.matrices() if n.startswith("model.layers.") and not n.endswith(".gate.weight")]
    work = {name.removesuffix(".weight"): partial(quantize, source.tensor(name)) for name in names}
    work[HEAD] = partial(quantize_int8, source.tensor(_EMBEDDING if tied else f"{HEAD}.weight"))
    return _each(work)


def _stored(source: _Checkpoint, stored: StoredQuantization) -> Iterator[tuple[str, QuantizedMatrix]]:
    names = stored_names(source.names, stored)
    return _each({name: partial(read_stored, name, source.tensor, source.names, stored) for name in names})


def _each(work: Mapping[str, Callable[[], QuantizedMatrix]]) -> Iterator[tuple[str, QuantizedMatrix]]:
    """A matrix a thread, rather than torch's threads on each of many short operations."""
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from zip(work, pool.map(lambda make: make(), work.values()), strict=True)


def _fields_of(matrix: QuantizedMatrix) -> Iterator[tuple[str, torch.Tensor]]:
    for field in _FIELDS:
        if (tensor := getattr(matrix, field)) is not None:
            yield field, tensor


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[np.generic] = tensor.numpy()
    return array


class _Checkpoint:
    """All tensors of a directory's shards, by name."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._opened: dict[Path, Any] = {}
        self.names = {name: (shard, e) for shard in shard_files(model_dir) for name, e in read_header(shard).items()}

    def matrices(self) -> list[str]:
        """Names of floating-point matrices."""
        return [
            name
            for name, (_, e) in self.names.items()
            if name.endswith(".weight") and len(e.shape) == 2 and e.dtype in ("F32", "F16", "BF16")
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file. Raises CheckpointError when it is missing."""
        if name not in self.names:
            raise CheckpointError(
                f"{self._model_dir}: {name} is missing, though the checkpoint's other tensors call for it"
            )
        shard, _ = self.names[name]
        if shard not in self._opened:
            self._opened[shard] = safe_open(shard, framework="pt")
        tensor: torch.Tensor = self._opened[shard].get_tensor(name)
        return tensor
