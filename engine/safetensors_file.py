"""safetensors files without torch: checked headers, and a writer that holds one tensor at a time.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config_fields import CheckpointError, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # the format's own limit
DATA_ALIGNMENT_BYTES = 64  # the header is padded so that mapped tensors start on a cache line
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
DTYPE_BYTES = FLOAT_BYTES | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
GIVEN_AS = {  # to write_tensors
    "F32": (np.float32,),
    "F16": (np.float16,),
    "BF16": (np.float32, np.uint16),
    "U8": (np.uint8,),
    "I8": (np.int8,),
}

Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype as in the header, shape


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `dtype` as in the header ("BF16"), data bytes [start, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def shard_files(model_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files in name order. Raises CheckpointError when there is none or one is missing."""
    index = model_dir / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if missing := [name for name in names if not (model_dir / name).is_file()]:
            raise CheckpointError(f"{model_dir / missing[0]} is missing, though {INDEX_NAME} names it: copy it again")
        return [model_dir / name for name in names]
    if (model_dir / SINGLE_NAME).is_file():
        return [model_dir / SINGLE_NAME]
    raise CheckpointError(f"{model_dir} has no {SINGLE_NAME} or {INDEX_NAME}: only safetensors weights are read")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of `file` by name. Raises CheckpointError when the file is cut short or malformed."""
    header, data_start = _read_raw_header(file)
    try:
        entries = {
            name: TensorEntry(str(t["dtype"]), tuple(map(int, t["shape"])), *map(int, t["data_offsets"]))
            for name, t in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} has a malformed header ({_brief(error)}): copy it again") from None
    _check_extent(file, entries, data_start)
    return entries


def _brief(error: Exception) -> str:
    """One that quotes the bytes it could not read quotes all of them."""
    return f"byte {error.start}: {error.reason}" if isinstance(error, UnicodeDecodeError) else repr(error)


def _check_extent(file: Path, entries: Mapping[str, TensorEntry], data_start: int) -> None:
    """As the format has it, tensors cover the data without gaps. Raises CheckpointError."""
    needed = data_start + max((e.end for e in entries.values()), default=0)
    if (size := file.stat().st_size) < needed:
        raise CheckpointError(f"{file} is cut short: {size:,} of {needed:,} bytes are there: copy it again")
    if size > needed:
        raise CheckpointError(f"{file} has {size - needed:,} bytes after its last tensor: copy it again")
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise CheckpointError(
                f"{file}: {name} begins at byte {entry.start:,} of the data, not {end:,}: copy it again"
            )
        end = entry.end
        num_bytes = entry.num_elements * DTYPE_BYTES.get(entry.dtype, 0)
        if num_bytes not in (0, end - entry.start):
            what = f"{entry.dtype} of shape {entry.shape}"
            raise CheckpointError(f"{file}: {name} has {end - entry.start:,} bytes, which is not {what}: copy it again")


def _read_raw_header(file: Path) -> tuple[bytes, int]:
    """Header bytes, and where the data starts."""
    with file.open("rb") as f:
        prefix = f.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        header = f.read(length) if length <= MAX_HEADER_BYTES else b""
    if len(header) != length:
        raise CheckpointError(f"{file} is cut short or no safetensors file: copy it again")
    return header, 8 + length


def write_tensors(
    file: Path,
    layout: Layout,
    tensors: Iterable[tuple[str, NDArray[Any]]],
    on_written: Callable[[int, int], None],
) -> None:
    """Writes `tensors`, in the order of `layout`; calls on_written(bytes, of bytes).

    What becomes BF16 is given as float32 and rounded, or as its bits. ValueError when they do not come as `layout`
    says.
    """
    header, total = _layout_header(layout)
    expected = iter(layout.items())
    written = 0
    with file.open("wb") as f:
        f.write(header)
        for name, values in tensors:
            wanted = next(expected, None)
            if (
                wanted is None
                or wanted != (name, (wanted[1][0], values.shape))
                or values.dtype not in GIVEN_AS[wanted[1][0]]
            ):
                raise ValueError(f"expected {wanted}, got {name} {values.dtype} {values.shape}")
            rounded = wanted[1][0] == "BF16" and values.dtype == np.float32
            data = to_bfloat16(values) if rounded else np.ascontiguousarray(values)
            f.write(data.tobytes())
            written += data.nbytes
            on_written(written, total)
        f.flush()
        os.fsync(f.fileno())
    if written != total:
        raise ValueError(f"{written} of {total} bytes were given")


def _layout_header(layout: Layout) -> tuple[bytes, int]:
    """The bytes before the data, and the number of data bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + DTYPE_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text, offset


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns, rounded to nearest even. NaN is not expected among weights and may become infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded
