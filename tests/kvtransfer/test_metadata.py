"""Metadata bytes: what was encoded comes back, and nothing that a peer sends does harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.backends.base import Region
from kvtransfer.descs import MemType
from kvtransfer.errors import nixlMismatchError
from kvtransfer.metadata import AgentMetadata, decode, encode

NAMES = st.text(min_size=1, max_size=20)
REGIONS = st.builds(
    Region,
    mem_type=st.sampled_from(MemType),
    address=st.integers(0, 2**63),
    num_bytes=st.integers(0, 2**63),
    device=st.integers(0, 8),
    key=st.text(max_size=10),
)
METADATA = st.builds(
    AgentMetadata,
    name=NAMES,
    connections=st.dictionaries(NAMES, st.text(max_size=30), max_size=3),
    regions=st.dictionaries(NAMES, st.lists(REGIONS, max_size=4).map(tuple), max_size=3),
)
GOOD = AgentMetadata("a", {"shm": "x"}, {"shm": (Region(MemType.DRAM_SEG, 16, 32, 0, "k"),)})


@given(metadata=METADATA)
def test_what_was_encoded_comes_back(metadata: AgentMetadata) -> None:
    assert decode(encode(metadata)) == metadata


@given(data=st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    for attempt in (data, b"PDKVM1" + data):
        with pytest.raises(nixlMismatchError):
            decode(attempt)


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": 5},
        {"name": None},
        {"connections": []},
        {"connections": {"shm": 5}},
        {"regions": []},
        {"regions": {"shm": [[]]}},
        {"regions": {"shm": [["DRAM_SEG", -1, 2, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", 1, 1 << 64, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", (1 << 64) - 1, 2, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", 1.5, 2, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", True, 2, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", "1", 2, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", 1, 2, 0, 7]]}},
        {"regions": {"shm": [["MOON_SEG", 1, 2, 0, ""]]}},
        {"regions": {"shm": [["DRAM_SEG", 1, 2, 0]]}},
    ],
    ids=str,
)
def test_each_field_is_checked(change: dict[str, object]) -> None:
    content = json.loads(encode(GOOD)[6:]) | change
    with pytest.raises(nixlMismatchError):
        decode(b"PDKVM1" + json.dumps(content).encode())


def test_depth_is_survived() -> None:
    with pytest.raises(nixlMismatchError):
        decode(b"PDKVM1" + b"[" * 100_000)
