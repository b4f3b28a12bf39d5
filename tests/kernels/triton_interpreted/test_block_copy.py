from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks

NUM_BLOCKS = 24


@given(
    size=st.sampled_from([3, 16, 1040, 16_384, 40_000]),
    padding=st.sampled_from([0, 5, 64]),
    ids=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1),
)
@example(size=40_000, padding=0, ids=[5, 0, 9, 2, 23, 7])
def test_gather_and_scatter(size: int, padding: int, ids: list[int]) -> None:
    """Rows of vectors and rows that are none, one piece and several, fewer pieces than programs and more."""
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
