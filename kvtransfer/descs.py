"""Descriptor lists, as NIXL's nixlXferDList and nixlRegDList, and everything that can be turned into one.

A descriptor is (address, length in bytes, device id); a registration carries a few bytes of meta information too.
Addresses are those of the memory's owner.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import nixlMismatchError, nixlNotFoundError

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint64]  # [N, 3]: address, length, device
XferTuple = tuple[int, int, int]
RegTuple = tuple[int, int, int, bytes]
Item = TypeVar("Item", bound=tuple[Any, ...])


class MemType(enum.Enum):
    """NIXL's nixl_mem_t."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


MEM_TYPES = {
    "DRAM": MemType.DRAM_SEG,
    "VRAM": MemType.VRAM_SEG,
    "FILE": MemType.FILE_SEG,
    "BLOCK": MemType.BLK_SEG,
    "OBJ": MemType.OBJ_SEG,
    "cpu": MemType.DRAM_SEG,  # deprecated in NIXL, still used
    "cuda": MemType.VRAM_SEG,  # likewise
}


class DescList(Generic[Item]):
    """What transfer and registration lists share. Method names are NIXL's."""

    width = 3

    def __init__(self, mem_type: MemType, descs: list[Item] | npt.NDArray[Any] | None = None) -> None:
        """From tuples, or from an integer array [N, 3]. Raises TypeError and ValueError."""
        self._mem_type = mem_type
        self._rows: Rows = np.empty((0, 3), np.uint64)
        self._metas: list[bytes] = []  # of registrations only
        if isinstance(descs, np.ndarray):
            self._rows = checked_rows(descs)
            self._metas = [b""] * len(descs)
        elif isinstance(descs, list):
            self._extend(descs)
        elif descs is not None:
            raise TypeError(f"descs = {type(descs).__name__}: must be a list of {self.width}-tuples or an N x 3 array")

    def _extend(self, descs: list[Item]) -> None:
        for desc in descs:
            if not isinstance(desc, tuple) or len(desc) != self.width:
                raise ValueError(f"descriptor {desc!r}: must be a tuple of exactly {self.width} elements")
        rows = [[checked_int(value, what) for value, what in zip(desc[:3], FIELDS, strict=True)] for desc in descs]
        self._metas += [checked_meta(desc[3] if self.width > 3 else b"") for desc in descs]
        self._rows = np.concatenate([self._rows, np.array(rows, np.uint64).reshape(-1, 3)])

    def _item(self, index: int) -> Item:
        raise NotImplementedError

    @property
    def rows(self) -> Rows:
        """uint64 [N, 3]: address, length, device. Not to be written to."""
        return self._rows

    def getType(self) -> MemType:  # noqa: N802 - NIXL's name
        return self._mem_type

    def descCount(self) -> int:  # noqa: N802 - NIXL's name
        return len(self._rows)

    def isEmpty(self) -> bool:  # noqa: N802 - NIXL's name
        return len(self._rows) == 0

    def append(self, desc: Item) -> None:
        self._extend([desc])

    addDesc = append  # noqa: N815 - NIXL's name

    def remDesc(self, index: int) -> None:  # noqa: N802 - NIXL's name
        self[index]
        self._rows = np.delete(self._rows, index, axis=0)
        del self._metas[index]

    def clear(self) -> None:
        self._rows, self._metas = self._rows[:0], []

    def index(self, desc: Item) -> int:
        """Raises nixlNotFoundError."""
        for i, item in enumerate(self):
            if item == desc:
                return i
        raise nixlNotFoundError(f"descriptor {desc!r} is not in the list")

    def __getitem__(self, index: int) -> Item:
        if index < 0:
            raise TypeError(f"index = {index}: must not be negative")
        if index >= len(self):
            raise IndexError(f"index = {index}: the list has {len(self)} descriptors")
        return self._item(index)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Item]:
        return (self._item(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DescList) or type(other) is not type(self):
            return NotImplemented
        same = self._mem_type is other._mem_type and self._metas == other._metas
        return same and np.array_equal(self._rows, other._rows)

    __hash__ = None  # type: ignore[assignment]  # a mutable list, like NIXL's

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._mem_type.name}, {list(self)})"


class XferDescs(DescList[XferTuple]):
    def _item(self, index: int) -> XferTuple:
        address, length, device = self._rows[index].tolist()
        return address, length, device


class RegDescs(DescList[RegTuple]):
    width = 4

    def _item(self, index: int) -> RegTuple:
        address, length, device = self._rows[index].tolist()
        return address, length, device, self._metas[index]

    def trim(self) -> XferDescs:
        """The same list without meta information, for transfers."""
        return XferDescs(self._mem_type, self._rows)


FIELDS = ("address", "length", "device id")


def checked_meta(meta: Any) -> bytes:
    """NIXL takes str as well as bytes. Raises TypeError."""
    if not isinstance(meta, (bytes, str)):
        raise TypeError(f"meta = {meta!r}: must be bytes or str")
    return meta.encode() if isinstance(meta, str) else meta


def checked_int(value: Any, what: str) -> int:
    """`value` as an int below 2^64. Raises TypeError and ValueError."""
    number = value.__index__() if hasattr(value, "__index__") else None
    if number is None:
        raise TypeError(f"{what} = {value!r}: must be an integer")
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{what} = {value!r}: must be in 0 .. 2^64 - 1")
    return int(number)


def checked_rows(array: npt.NDArray[Any], width: int = 3) -> Rows:
    """uint64 [N, width] of an integer array of that shape. Raises ValueError."""
    if array.ndim != 2 or array.shape[1] != width or array.dtype not in (np.uint64, np.int64):
        raise ValueError(
            f"descs: must be a Nx{width} numpy array of uint64 or int64, not {array.dtype} {list(array.shape)}"
        )
    if array.dtype == np.int64 and bool((array < 0).any()):
        raise ValueError(f"descs = {array.min()}: addresses, lengths and device ids must not be negative")
    return array.astype(np.uint64)  # a copy: the caller may change its array


# --- from tuples, arrays and tensors ---


def to_xfer_descs(descs: Any, mem_type: str | None) -> XferDescs | None:
    """None, with the reason logged, for what NIXL answers None to."""
    if isinstance(descs, XferDescs):
        return descs
    if isinstance(descs, RegDescs):
        log.error("RegList type detected for transfer, please use XferList")
        return None
    return _convert(descs, mem_type, XferDescs)


def to_reg_descs(descs: Any, mem_type: str | None) -> RegDescs | None:
    """None, with the reason logged, for what NIXL answers None to."""
    if isinstance(descs, RegDescs):
        return descs
    if isinstance(descs, XferDescs):
        log.error("XferList type detected for registration, please use RegList")
        return None
    return _convert(descs, mem_type, RegDescs)


AnyDescs = TypeVar("AnyDescs", XferDescs, RegDescs)


def _convert(descs: Any, mem_type: str | None, kind: type[AnyDescs]) -> AnyDescs | None:
    tensors = _tensors(descs, mem_type)
    if tensors is not None:
        return _from_tensors(tensors, kind)
    first = descs[0]
    is_array = isinstance(descs, np.ndarray)
    if not is_array and not isinstance(first, tuple):
        return None
    if mem_type is None:
        log.error("Please specify a mem type if not using Tensors")
        return None
    right = descs.ndim == 2 and descs.shape[1] == 3 if is_array else len(first) == kind.width
    if not right:
        log.error("Nx3 shape or a list of %d-tuples needed for %s", kind.width, kind.__name__)
        return None
    return kind(MEM_TYPES[mem_type], descs)


def _tensors(descs: Any, mem_type: str | None) -> Sequence[Any] | None:
    """`descs` as a list of torch tensors or data arrays, if it is one. An array that could hold descriptors, or comes
    with a memory type, is no data."""
    if is_tensor(descs):
        return [descs]
    if isinstance(descs, np.ndarray):
        is_data = mem_type is None and not (descs.ndim == 2 and descs.shape[1] == 3)
        return [descs] if is_data else None
    if isinstance(descs, (list, tuple)) and descs and (is_tensor(descs[0]) or isinstance(descs[0], np.ndarray)):
        return descs
    return None


def is_tensor(value: Any) -> bool:
    """Duck-typed: this package does not import torch."""
    return all(hasattr(value, name) for name in ("data_ptr", "element_size", "numel", "is_contiguous", "get_device"))


def _from_tensors(tensors: Sequence[Any], kind: type[AnyDescs]) -> AnyDescs | None:
    """One descriptor a tensor. None, logged, when one is not contiguous or they lie on different devices."""
    spans = [_tensor_span(tensor) for tensor in tensors]
    devices = {span[2] if span else None for span in spans}
    if None in devices:
        log.error("Please use a list of contiguous Tensors")
        return None
    if len(devices) > 1:
        log.error("Tensors of one list must lie on one device, not on %s", devices)
        return None
    device = spans[0][2] if spans[0] else -1
    mem_type = MemType.DRAM_SEG if device == -1 else MemType.VRAM_SEG
    return kind(mem_type, np.array([(s[0], s[1], max(s[2], 0)) for s in spans if s], np.uint64))


def _tensor_span(tensor: Any) -> tuple[int, int, int] | None:
    """(address, bytes, device or -1 for the CPU), or None when not contiguous."""
    if isinstance(tensor, np.ndarray):
        return (tensor.ctypes.data, tensor.nbytes, -1) if tensor.flags.c_contiguous else None
    if not tensor.is_contiguous():
        return None
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.get_device()


# --- bytes for the wire ---

_MAGIC = b"PDKVD1"


def serialize(descs: XferDescs | RegDescs) -> bytes:
    """Magic, kind, memory type, count, rows of three little-endian uint64, then each registration's length and meta."""
    head = _MAGIC + bytes([descs.width, descs.getType().value]) + len(descs).to_bytes(8, "little")
    metas = [item[3] for item in descs] if isinstance(descs, RegDescs) else []
    tail = b"".join(len(meta).to_bytes(4, "little") + meta for meta in metas)
    return head + descs.rows.astype("<u8").tobytes() + tail


def deserialize(data: bytes) -> XferDescs | RegDescs:
    """Raises nixlMismatchError for anything that `serialize` did not write."""
    try:
        return _parse(data)
    except (ValueError, IndexError) as error:
        raise nixlMismatchError(f"not a serialized descriptor list: {error}") from None


def _parse(data: bytes) -> XferDescs | RegDescs:
    start = len(_MAGIC) + 10
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"it starts with {data[: len(_MAGIC)]!r}, not {_MAGIC!r}")
    width, mem_type = data[len(_MAGIC)], MemType(data[len(_MAGIC) + 1])
    end = start + 24 * int.from_bytes(data[start - 8 : start], "little")
    if end > len(data) or width not in (XferDescs.width, RegDescs.width):
        raise ValueError(f"{len(data)} bytes, {width} fields")
    rows = np.frombuffer(data[start:end], "<u8").reshape(-1, 3)
    metas = _parse_metas(data[end:])
    if len(metas) != (len(rows) if width == RegDescs.width else 0):
        raise ValueError(f"{len(rows)} descriptors with {len(metas)} metas")
    if width == XferDescs.width:
        return XferDescs(mem_type, rows.astype(np.uint64))
    return RegDescs(mem_type, [(*row, meta) for row, meta in zip(rows.tolist(), metas, strict=True)])


def _parse_metas(data: bytes) -> list[bytes]:
    metas, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + length > len(data):
            raise ValueError("a meta is cut short")
        metas.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return metas
