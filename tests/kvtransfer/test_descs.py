"""Descriptor lists: what can be turned into one, what NIXL answers None to, and their bytes on the wire."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.descs import MemType, RegDescs, XferDescs, deserialize, serialize, to_reg_descs, to_xfer_descs
from kvtransfer.errors import nixlMismatchError, nixlNotFoundError

WORD = st.integers(0, 2**64 - 1)
XFERS = st.lists(st.tuples(WORD, WORD, WORD), max_size=8).map(lambda rows: XferDescs(MemType.DRAM_SEG, rows))
REGS = st.lists(st.tuples(WORD, WORD, WORD, st.binary(max_size=20)), max_size=8).map(
    lambda rows: RegDescs(MemType.VRAM_SEG, rows)
)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_tuples_and_arrays_are_the_same(dtype: Any) -> None:
    from_tuples = to_xfer_descs([(16, 2, 0), (32, 4, 1)], "DRAM")
    assert from_tuples == to_xfer_descs(np.array([[16, 2, 0], [32, 4, 1]], dtype), "DRAM")
    assert from_tuples is not None
    assert (from_tuples[1], len(from_tuples), from_tuples.getType()) == ((32, 4, 1), 2, MemType.DRAM_SEG)


def test_a_list_as_it_is() -> None:
    descs = to_xfer_descs([(1, 2, 0)], "cpu")
    assert to_xfer_descs(descs, None) is descs
    regs = to_reg_descs([(1, 2, 0, "meta")], "cuda")
    assert to_reg_descs(regs, None) is regs
    assert regs is not None
    assert (regs[0], regs.getType()) == ((1, 2, 0, b"meta"), MemType.VRAM_SEG)
    assert regs.trim() == XferDescs(MemType.VRAM_SEG, [(1, 2, 0)])


@pytest.mark.parametrize("array", [torch.arange(12, dtype=torch.float32), np.arange(12, dtype=np.float32)])
def test_tensors_and_arrays_of_data(array: Any) -> None:
    address = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    expected = XferDescs(MemType.DRAM_SEG, [(address, 48, 0)])
    assert to_xfer_descs(array, None) == expected
    assert to_xfer_descs([array], None) == expected
    many = to_reg_descs([array, array[4:8]], None)
    assert many is not None
    assert list(many) == [(address, 48, 0, b""), (address + 16, 16, 0, b"")]
    assert to_reg_descs([array.reshape(3, 4).T], None) is None


class GpuTensor:
    """What a torch tensor on a device looks like to us."""

    def __init__(self, device: int) -> None:
        self._device = device

    def data_ptr(self) -> int:
        return 1 << 40

    def numel(self) -> int:
        return 10

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return True

    def get_device(self) -> int:
        return self._device


def test_tensors_on_a_device() -> None:
    assert to_xfer_descs(GpuTensor(3), None) == XferDescs(MemType.VRAM_SEG, [(1 << 40, 20, 3)])
    assert to_xfer_descs([GpuTensor(3), GpuTensor(1)], None) is None
    assert to_xfer_descs([GpuTensor(0), torch.zeros(2)], None) is None


@pytest.mark.parametrize(
    ("descs", "mem_type"),
    [
        ([(1, 2, 0)], None),
        ([(1, 2, 0, "")], "DRAM"),
        ([(1, 2)], "DRAM"),
        (np.zeros((2, 2), np.int64), "DRAM"),
        (np.zeros((2, 3), np.int64), None),  # descriptors without a memory type, not data
        ([[1, 2, 0]], "DRAM"),
        (RegDescs(MemType.DRAM_SEG), None),
    ],
)
def test_nixl_answers_none(descs: Any, mem_type: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert to_xfer_descs(descs, mem_type) is None
    assert caplog.records or isinstance(descs[0], list)


@pytest.mark.parametrize(
    ("descs", "mem_type", "error"),
    [
        ([], "DRAM", IndexError),
        (np.zeros((0, 3), np.uint64), "DRAM", IndexError),
        ([(1, 2, 0)], "MOON", KeyError),
        ([(1, 2, 0), (1, 2)], "DRAM", ValueError),
        ([(-1, 2, 0)], "DRAM", ValueError),
        ([(1, 1 << 64, 0)], "DRAM", ValueError),
        ([(1.5, 2, 0)], "DRAM", TypeError),
        ([("1", 2, 0)], "DRAM", TypeError),
        (((1, 2, 0),), "DRAM", TypeError),
        (np.zeros((1, 3)), "DRAM", ValueError),
        (np.array([[-1, 2, 0]]), "DRAM", ValueError),
        (None, "DRAM", TypeError),
        (5, "DRAM", TypeError),
    ],
)
def test_what_raises(descs: Any, mem_type: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        to_xfer_descs(descs, mem_type)


def test_a_meta_must_be_bytes_or_text() -> None:
    with pytest.raises(TypeError, match="meta = 5"):
        to_reg_descs([(1, 2, 0, 5)], "DRAM")


def test_list_methods() -> None:
    descs = RegDescs(MemType.DRAM_SEG, [(1, 2, 0, b"a"), (3, 4, 0, b"b")])
    descs.addDesc((5, 6, 0, b"c"))
    descs.remDesc(0)
    assert list(descs) == [(3, 4, 0, b"b"), (5, 6, 0, b"c")]
    assert (descs.index((5, 6, 0, b"c")), descs.descCount(), descs.isEmpty()) == (1, 2, False)
    with pytest.raises(nixlNotFoundError):
        descs.index((5, 6, 0, b""))
    for index, error in ((2, IndexError), (-1, TypeError)):
        with pytest.raises(error):
            descs[index]
        with pytest.raises(error):
            descs.remDesc(index)
    descs.clear()
    assert descs.isEmpty()
    assert descs == RegDescs(MemType.DRAM_SEG)
    assert descs != XferDescs(MemType.DRAM_SEG)


def test_changing_the_array_afterwards_changes_nothing() -> None:
    array = np.array([[1, 2, 0]], np.uint64)
    descs = XferDescs(MemType.DRAM_SEG, array)
    array[:] = 9
    assert list(descs) == [(1, 2, 0)]


# --- bytes ---


@given(descs=st.one_of(XFERS, REGS))
def test_what_was_serialized_comes_back(descs: XferDescs | RegDescs) -> None:
    again = deserialize(serialize(descs))
    assert type(again) is type(descs)
    assert again == descs


@given(data=st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(lambda tail: b"PDKVD1" + tail)))
def test_other_bytes_are_refused_or_mean_what_they_say(data: bytes) -> None:
    try:
        descs = deserialize(data)
    except nixlMismatchError:
        return
    assert serialize(descs) == data


@given(descs=st.one_of(XFERS, REGS), data=st.data())
def test_a_cut_or_changed_list_never_crashes(descs: XferDescs | RegDescs, data: st.DataObject) -> None:
    whole = bytearray(serialize(descs))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(nixlMismatchError):
        deserialize(cut)
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    test_other_bytes_are_refused_or_mean_what_they_say.hypothesis.inner_test(bytes(whole))  # type: ignore[attr-defined]


def test_a_pickle_is_not_run() -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("a peer's bytes were executed",)

    with pytest.raises(nixlMismatchError):
        deserialize(pickle.dumps(Trap()))
