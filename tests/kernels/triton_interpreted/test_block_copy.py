from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks

NUM_BLOCKS = 24


@given(data=st.data())
def test_gather_and_scatter(data: st.DataObject) -> None:
    """Rows of vectors and rows that are none, one piece and several, fewer pieces than programs and more."""
    size = data.draw(st.sampled_from([3, 16, 1040, 16_384, 40_000]), label="size")
    padding = data.draw(st.sampled_from([0, 5, 64]), label="padding")
    ids = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1), label="ids")
    generator = torch.Generator().manual_seed(size)
    wide = torch.randint(256, (NUM_BLOCKS, size + padding), dtype=torch.uint8, generator=generator)
    before, blocks = wide.clone(), wide[:, :size]
    buffer = torch.empty(len(ids), size, dtype=torch.uint8)
    gather_blocks(blocks, ids, buffer, backend="triton")
    assert torch.equal(buffer, before[ids, :size])

    scatter_blocks(buffer.flip(0), blocks, ids, backend="triton")
    before[ids, :size] = buffer.flip(0)
    assert torch.equal(wide, before)


@pytest.mark.parametrize(("sources", "targets"), [([0, 5, 5], [3, 1, 2]), ([0, 1, 2], [1, 2, 0])])
def test_copies_that_do_and_do_not_overlap(sources: list[int], targets: list[int]) -> None:
    blocks = torch.arange(6 * 32, dtype=torch.uint8).view(6, 32)
    expected = blocks.clone()
    expected[targets] = blocks[sources]
    copy_blocks(blocks, sources, targets, backend="triton")
    assert torch.equal(blocks, expected)
