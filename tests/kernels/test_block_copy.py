from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from tests.kernels.backends import every_backend, using

NUM_BLOCKS = 9
every_size = st.sampled_from([1, 16, 100, 4096, 2**18 + 48])  # the last takes several pieces


def random_bytes(rows: int, columns: int, *, padding: int = 0) -> torch.Tensor:
    """Rows that lie `padding` bytes apart."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(256, (rows, columns + padding), dtype=torch.uint8, generator=generator)[:, :columns]


@every_backend
@given(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=12), size=every_size, padding=st.sampled_from([0, 7]))
@settings(max_examples=30, deadline=None)
def test_gather_fills_the_buffer_in_order(implementation: str, ids: list[int], size: int, padding: int) -> None:
    blocks, buffer = random_bytes(NUM_BLOCKS, size, padding=padding), torch.empty(len(ids), size, dtype=torch.uint8)
    with using(implementation) as backend:
        gather_blocks(blocks, ids, buffer, backend=backend)
    for row, block in zip(buffer, ids, strict=True):
        assert torch.equal(row, blocks[block])


@every_backend
@given(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True), size=every_size, padding=st.sampled_from([0, 7]))
@settings(max_examples=30, deadline=None)
def test_scatter_writes_these_blocks_and_no_others(
    implementation: str, ids: list[int], size: int, padding: int
) -> None:
    blocks, buffer = random_bytes(NUM_BLOCKS, size, padding=padding), random_bytes(len(ids), size)
    expected = [buffer[ids.index(i)] if i in ids else blocks[i].clone() for i in range(NUM_BLOCKS)]
    with using(implementation) as backend:
        scatter_blocks(buffer, blocks, ids, backend=backend)
    assert torch.equal(blocks, torch.stack(expected))


@every_backend
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_copies_read_every_source_before_they_write(implementation: str, data: st.DataObject) -> None:
    targets = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    sources = [data.draw(st.integers(0, NUM_BLOCKS - 1)) for _ in targets]
    blocks = random_bytes(NUM_BLOCKS, 64)
    before = blocks.clone()
    with using(implementation) as backend:
        copy_blocks(blocks, sources, targets, backend=backend)
    for i, row in enumerate(blocks):
        assert torch.equal(row, before[sources[targets.index(i)]] if i in targets else before[i])


def test_what_is_refused() -> None:
    blocks, buffer = random_bytes(4, 16), random_bytes(2, 16)
    with pytest.raises(IndexError, match=r"block_ids holds 1 \.\. 4: must lie in 0 \.\. 3"):
        gather_blocks(blocks, [1, 4], buffer)
    with pytest.raises(IndexError, match=r"block_ids holds -1 \.\. 2"):
        scatter_blocks(buffer, blocks, [2, -1])
    with pytest.raises(ValueError, match="block_ids holds 3 twice: each block can be written once"):
        scatter_blocks(buffer, blocks, [3, 3])
    with pytest.raises(ValueError, match=r"buffer has shape \(2, 16\), expected \(3, 16\)"):
        gather_blocks(blocks, [1, 2, 3], buffer)
    with pytest.raises(TypeError, match=r"blocks has dtype torch.float32, expected torch.uint8"):
        gather_blocks(torch.zeros(4, 16), [1, 2], buffer)
    with pytest.raises(ValueError, match="targets has 1 entries, expected 2 as sources has"):
        copy_blocks(blocks, [0, 1], [2])
    with pytest.raises(ValueError, match="targets holds 2 twice"):
        copy_blocks(blocks, [0, 1], [2, 2])
