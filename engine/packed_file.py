"""Linears in the order in which they are multiplied, made once and mapped by all pods of a host.

    <XDG_CACHE_HOME or ~/.cache>/pdserve/packed/<model>-<weights revision>-<kind>-<version>.safetensors

For a quantised linear `x`: x.packed, x.row_scales, x.scales and x.offsets, as kernels/quantized.py has them; in panels
x.packed alone, as kernels/panels.py has it; x.plain alone, float32 [N, K], where a checkpoint's quantised groups are no
runs of columns. A file appears whole or not at all: it is written under another name, under a lock, and renamed. Its
last four bytes are a checksum of all before them, which each load compares: one with other bytes is made anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine import page_cache
from engine.checkpoint import CACHE_HINT, HEAD, cache_dir, head_name, locked, model_name, weights_revision
from engine.checksum import SIZE_BYTES, has_checksum, write_checksum
from engine.config_fields import CheckpointError
from engine.model_config import ModelConfig
from engine.quantization import QUANTIZER_VERSION, StoredQuantization
from engine.quantize import quantize_int4, quantize_int8
from engine.safetensors_file import Layout, read_header, write_tensors
from engine.stored_quantization import read_stored, stored_names
from engine.stored_tensors import StoredTensors, opened
from kernels.checks import check_shape
from kernels.linear import Part
from kernels.panels import PanelMatrix, pack, panel_shape
from kernels.quantized import QuantizedMatrix

_DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16", torch.float32: "F32"}
_FIELDS = ("packed", "row_scales", "scales", "offsets")
_PLAIN = "plain"
_CHECKSUM = "checksum"
_PANELS_VERSION = 3  # raise it when panels would lie in another order

_Linear = QuantizedMatrix | torch.Tensor  # a quantised linear, or the values of one

_log = logging.getLogger(__name__)


def packed_file(model_dir: Path, config: ModelConfig, quantization: str, in_panels: bool) -> Path | None:
    """The file with `model_dir`'s linears that are quantised, else in panels if they are wanted so; None: it has none.

    It is made now when it is not there. `quantization` has been checked against `config`. Raises CheckpointError when
    quantised weights cannot be written; panels can be made in memory as well, by each pod for itself.
    """
    method = config.quantization.method if config.quantization else quantization
    if method != "none":
        return _made(model_dir, method, QUANTIZER_VERSION, partial(_write_quantised, config, quantization))
    if not in_panels or not _Checkpoint(model_dir).bfloat16_matrices(config.tie_word_embeddings):
        return None
    try:
        return _made(model_dir, "panels", _PANELS_VERSION, partial(_write_panels, config.tie_word_embeddings))
    except CheckpointError as error:
        _log.warning("%s. Each pod keeps its own copy in memory instead.", error)
        return None


def forget(file: Path) -> None:
    """Removes the file of a checkpoint that cannot be loaded: hundreds of megabytes that nothing would ever map."""
    with suppress(OSError):  # of a cache that is read only
        file.unlink()


def _made(model_dir: Path, kind: str, version: int, write: Callable[[_Checkpoint, Path], None]) -> Path:
    """The file of `kind`, written in place of earlier versions unless it is there. Raises CheckpointError."""
    stem = f"{model_name(model_dir)}-{weights_revision(model_dir)}-{kind}"
    key = f"{stem}-{version}"
    folder = cache_dir().parent / "packed"
    target = folder / f"{key}.safetensors"
    try:
        if not _is_whole(target):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(target.with_name(f".{key}.lock")):
                if not _is_whole(target):  # another process may have made it while we waited
                    if target.exists():
                        _log.warning("%s is damaged, or of a release without checksums: it is made anew", target)
                    _make(model_dir, target, write)
                    for earlier in range(version):  # pods that have mapped one keep it
                        (folder / f"{stem}-{earlier}.safetensors").unlink(missing_ok=True)
    except OSError as error:
        message = f"cannot write the packed weights of {model_dir} to {target}: {error}; {CACHE_HINT}"
        raise CheckpointError(message) from error
    return target


def _make(model_dir: Path, target: Path, write: Callable[[_Checkpoint, Path], None]) -> None:
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        write(_Checkpoint(model_dir), unfinished)
        page_cache.fetch_again(unfinished)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_whole(file: Path) -> bool:
    try:
        page_cache.fetch(file)
        return has_checksum(file)
    except FileNotFoundError:
        return False


class PackedFile:
    """The linears of a mapped file, by name without suffix."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries = read_header(file)
        self._opened = opened(file)

    def __contains__(self, name: str) -> bool:
        return f"{name}.packed" in self._entries or f"{name}.{_PLAIN}" in self._entries

    def matrix(self, name: str, shape: tuple[int, int]) -> Part:
        """Views of the file. Raises CheckpointError when it is not of `shape`."""
        tensors = {
            field: self._opened.get_tensor(f"{name}.{field}")
            for field in (*_FIELDS, _PLAIN)
            if f"{name}.{field}" in self._entries
        }
        try:
            if _PLAIN in tensors:
                check_shape(_PLAIN, tensors[_PLAIN], shape)
                plain: torch.Tensor = tensors[_PLAIN]
                return plain
            if "row_scales" in tensors:
                return QuantizedMatrix(*shape, **tensors)
            return PanelMatrix(*shape, tensors["packed"])
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._file}: {name}: {error}; config.json calls for {shape}") from None


def _write_panels(tied: bool, source: _Checkpoint, target: Path) -> None:
    """One matrix after the other, however large the model is."""
    matrices = source.bfloat16_matrices(tied)
    layout = {
        f"{name}.packed": ("BF16", panel_shape(source.shape(of), torch.bfloat16)) for name, of in matrices.items()
    }
    bits = ((f"{name}.packed", _bits(pack(source.tensor(of)))) for name, of in matrices.items())
    _write(target, layout, bits)


def _bits(matrix: PanelMatrix) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = matrix.packed.view(torch.int16).numpy().view(np.uint16)
    return bits


def _write_quantised(config: ModelConfig, quantization: str, source: _Checkpoint, target: Path) -> None:
    stored = config.quantization
    linears = _stored(source, stored) if stored else _rounded(source, quantization, config.tie_word_embeddings)
    tensors = {f"{name}.{field}": t for name, matrix in linears for field, t in _fields_of(matrix)}
    plain = [t for name, t in tensors.items() if name.endswith(f".{_PLAIN}")]
    if plain:
        _log.warning(
            "%d linears have their columns in the order of activations (GPTQ's desc_act): they are kept in float32 and "
            "take %.0f MiB, more than as integers",
            len(plain),
            sum(t.nbytes for t in plain) / 2**20,
        )
    whole_lines = (".packed", f".{_PLAIN}")  # their sizes keep cache lines whole for what follows
    order = sorted(tensors, key=lambda name: not name.endswith(whole_lines))
    layout = {name: (_DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in order}
    _write(target, layout, ((name, _array(tensors[name])) for name in order))


def _write(target: Path, layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """With its checksum as the last tensor."""
    room = np.zeros(SIZE_BYTES, np.uint8)
    layout = {**layout, _CHECKSUM: ("U8", room.shape)}
    write_tensors(target, layout, chain(tensors, [(_CHECKSUM, room)]), lambda _done, _of: None)
    write_checksum(target)


def _rounded(source: _Checkpoint, quantization: str, tied: bool) -> Iterator[tuple[str, _Linear]]:
    """Linears of the layers in `quantization`, the head in 8 bits: it is the most sensitive, and large in small models.

    An expert layer's router keeps its precision.
    """
    quantize = quantize_int8 if quantization == "int8" else quantize_int4
    names = [n for n in source.matrices() if n.startswith("model.layers.") and not n.endswith(".gate.weight")]
    work: dict[str, Callable[[], _Linear]] = {
        name.removesuffix(".weight"): partial(quantize, source.tensor(name)) for name in names
    }
    work[HEAD] = partial(quantize_int8, source.tensor(head_name(source.entries, tied)))
    return _each(work)


def _stored(source: _Checkpoint, stored: StoredQuantization) -> Iterator[tuple[str, _Linear]]:
    names = stored_names(source.entries, stored)
    return _each({name: partial(read_stored, name, source.tensor, source.entries, stored) for name in names})


def _each(work: Mapping[str, Callable[[], _Linear]]) -> Iterator[tuple[str, _Linear]]:
    """A matrix a thread, rather than torch's threads on each of many short operations."""
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from zip(work, pool.map(lambda make: make(), work.values()), strict=True)


def _fields_of(matrix: _Linear) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(matrix, torch.Tensor):
        yield _PLAIN, matrix
        return
    for field in _FIELDS:
        if (tensor := getattr(matrix, field)) is not None:
            yield field, tensor


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[np.generic] = tensor.numpy()
    return array


class _Checkpoint(StoredTensors):
    """What of it is packed."""

    def matrices(self) -> list[str]:
        """Names of floating-point matrices."""
        return [
            name
            for name, e in self.entries.items()
            if name.endswith(".weight") and len(e.shape) == 2 and e.dtype in ("F32", "F16", "BF16")
        ]

    def bfloat16_matrices(self, tied: bool) -> dict[str, str]:
        """Linears of layers and head that are stored in bfloat16, and the tensor that each is."""
        found = {n.removesuffix(".weight"): n for n in self.matrices() if n.startswith("model.layers.")}
        found[HEAD] = head_name(self.entries, tied)
        return {name: of for name, of in found.items() if of in self.entries and self.entries[of].dtype == "BF16"}

    def shape(self, name: str) -> tuple[int, int]:
        """Of a matrix."""
        rows, columns = self.entries[name].shape
        return rows, columns

    def tensor(self, name: str) -> torch.Tensor:
        """A view. Raises CheckpointError when it is missing."""
        if name not in self.entries:
            raise CheckpointError(
                f"{self.model_dir}: {name} is missing, though the checkpoint's other tensors call for it"
            )
        return super().tensor(name)
