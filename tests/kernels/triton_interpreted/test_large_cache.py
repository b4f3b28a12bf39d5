"""Offsets past 2^31: memory that is virtual only, as untouched pages cost nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels import block_copy, kv_write, paged_decode, paged_prefill
from kernels.kv_cache import PagedKV
from tests.kernels.cases import assert_close, float64


@pytest.fixture(autouse=True)
def untouched_memory(poisoned_memory: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        yield


def test_cache_of_more_than_two_to_the_31_elements() -> None:
    num_blocks = 2**31 // (2 * 2 * 16 * 64) + 8
    kv = PagedKV(*torch.empty(num_blocks, 2, 2, 16, 64, dtype=torch.float16).unbind(1))
    k, v = torch.randn(2, 20, 2, 64).half()
    table = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, i // 16]) * 16 + i % 16 for i in range(20)])
    kv_write.kv_write(k, v, kv, slots, backend="triton")
    q, length = torch.randn(1, 2, 64).half(), torch.tensor([20], dtype=torch.int32)
    decoded = paged_decode.paged_decode(q, kv, table, length, 0.1, backend="triton")
    prefilled = paged_prefill.paged_prefill(
        *(q, kv, table, torch.tensor([0, 1], dtype=torch.int32), length, 0.1), backend="triton"
    )
    scores = np.einsum("hd,thd->ht", float64(q[0]), float64(k)) * 0.1
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    expected = np.einsum("ht,thd->hd", weights, float64(v))[None]
    assert_close(decoded, expected, extra=1e-3)
    assert_close(prefilled, expected, extra=1e-3)


def test_blocks_past_two_to_the_31_bytes() -> None:
    blocks = torch.empty(2**31 // 4096 + 8, 4096, dtype=torch.uint8)
    last, buffer = blocks.shape[0] - 1, torch.empty(1, 4096, dtype=torch.uint8)
    blocks[last] = 7
    block_copy.gather_blocks(blocks, [last], buffer, backend="triton")
    block_copy.scatter_blocks(buffer, blocks, [last - 1], backend="triton")
    assert buffer.eq(7).all()
    assert blocks[last - 1].eq(7).all()
