"""Copy plans: every byte goes where its descriptor says, merged or not, and none outside registered memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import copying
from kvtransfer.backends.base import Region
from kvtransfer.descs import MemType, XferDescs
from kvtransfer.errors import nixlInvalidParamError, nixlNotFoundError
from kvtransfer.plan import locate, plan_copy

SIZE = 256


def region(address: int, num_bytes: int = SIZE, device: int = 0, mem_type: MemType = MemType.DRAM_SEG) -> Region:
    return Region(mem_type, address, num_bytes, device, "")


def descs(*rows: tuple[int, int]) -> XferDescs:
    return XferDescs(MemType.DRAM_SEG, [(address, length, 0) for address, length in rows])


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(near, far, length) that do not overlap on the side written to."""
    result: list[tuple[int, int, int]] = []
    near = 0
    while near < SIZE and len(result) < 12:
        length = draw(st.integers(0, 40))
        if near + length > SIZE:
            break
        previous = result[-1] if result else (0, 0, 0)
        follow = draw(st.booleans())
        far = previous[1] + previous[2] if follow else draw(st.integers(0, SIZE))
        if far + length <= SIZE:
            result.append((near, far, length))
        near += length + (0 if follow else draw(st.integers(0, 5)))
    return result or [(0, 0, 1)]


@given(spans=spans(), read=st.booleans(), shift=st.integers(0, SIZE))
def test_a_plan_moves_what_its_descriptors_say(spans: list[tuple[int, int, int]], read: bool, shift: int) -> None:
    """`shift`: the peer's memory is mapped elsewhere than where its owner has it."""
    near = np.arange(SIZE, dtype=np.uint8)
    far = np.full(2 * SIZE, 255, np.uint8)
    far[shift : shift + SIZE] = np.arange(SIZE)[::-1]
    near_base, far_base, owner_base = near.ctypes.data, far.ctypes.data + shift, 1 << 50
    if not read:
        spans = [(b, a, n) for a, b, n in spans]
    expected_near, expected_far = near.copy(), far.copy()
    for a, b, n in spans:
        if read:
            expected_near[a : a + n] = far[shift + b : shift + b + n]
        else:
            expected_far[shift + b : shift + b + n] = near[a : a + n]
    local = locate(descs(*((near_base + a, n) for a, _, n in spans)), [region(near_base)])
    remote = locate(descs(*((owner_base + b, n) for _, b, n in spans)), [region(owner_base)])
    plan = plan_copy(read, local, remote, "peer")
    copying.run(plan, [far_base - owner_base])
    assert np.array_equal(near, expected_near)
    assert np.array_equal(far, expected_far)
    assert plan.num_bytes == sum(n for _, _, n in spans)


def test_neighbours_merge_only_when_contiguous_on_both_sides_and_in_one_region() -> None:
    near = [region(0, 1000)]
    far = [region(5000, 100), region(5100, 100)]
    plan = plan_copy(
        True,
        locate(descs((0, 50), (50, 50), (100, 50), (150, 10), (170, 10)), near),
        locate(descs((5000, 50), (5050, 50), (5100, 50), (5150, 10), (5160, 10)), far),
        "peer",
    )
    assert plan.lengths.tolist() == [100, 60, 10]
    assert plan.region_of.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("address", "length"),
    [(99, 1), (100, 257), (356, 1), (101, 256), (0, 0), (100, 2**64 - 1), (2**64 - 1, 1), (2**64 - 1, 200)],
)
def test_nothing_outside_is_located(address: int, length: int) -> None:
    with pytest.raises(nixlNotFoundError, match=f"{length} bytes"):
        locate(descs((100, 1), (address, length)), [region(100)])


def test_a_span_across_two_regions_is_in_neither() -> None:
    with pytest.raises(nixlNotFoundError):
        locate(descs((90, 20)), [region(0, 100), region(100, 100)])


def test_device_and_memory_type_must_match() -> None:
    with pytest.raises(nixlNotFoundError):
        locate(descs((0, 1)), [region(0, device=1), region(0, mem_type=MemType.VRAM_SEG)])


def test_overlapping_regions_each_count() -> None:
    """A small region inside a large one must not hide it."""
    side = locate(descs((0, 10), (50, 100)), [region(40, 20), region(0, 200)])
    assert side.region_of.tolist() == [1, 1]


def test_the_last_byte_of_the_address_space_is_in_reach() -> None:
    side = locate(descs((2**64 - 10, 10)), [region(2**64 - 10, 10)])
    assert side.region_of.tolist() == [0]


def test_sides_must_fit() -> None:
    near = locate(descs((0, 1), (1, 1)), [region(0)])
    for bad in (descs((0, 1)), descs((0, 1), (1, 2))):
        with pytest.raises(nixlInvalidParamError):
            plan_copy(True, near, locate(bad, [region(0)]), None)
