from __future__ import annotations

import dataclasses

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.paged_prefill import paged_prefill
from tests.kernels.cases import WEIGHT_ROUNDING, Attention, Shape, assert_attends, attention, shapes, slot_major
from tests.kernels.triton_interpreted.precisions import DTYPES

CHUNKS = Shape(2, 3, 64, 16, torch.float32, ((70, 180), (1, 17), (5, 5)), seed=3)


def prefill(case: Attention) -> torch.Tensor:
    return paged_prefill(
        *(case.q, case.kv, case.block_tables, case.cu_seqlens, case.context_lens, case.scale),
        **case.limits,
        backend="triton",
    )


@given(shape=shapes(max_new=150, max_context=4096, max_kv_heads=2, groups=(1, 2, 3), dtypes=DTYPES))
@example(shape=CHUNKS)
@example(shape=dataclasses.replace(CHUNKS, sliding_window=1))
@example(shape=dataclasses.replace(CHUNKS, sliding_window=30, kv_dtype=torch.int8))
@example(shape=dataclasses.replace(CHUNKS, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn))
@example(shape=dataclasses.replace(CHUNKS, dtype=torch.float32, kv_dtype=torch.bfloat16))
@example(shape=dataclasses.replace(CHUNKS, sliding_window=100, soft_cap=20.0))
@example(shape=dataclasses.replace(CHUNKS, lengths=((9, 33),), num_kv_heads=1, group=4, head_dim=72, block_size=32))
def test_equals_dense_attention(shape: Shape) -> None:
    case = attention(shape)
    assert_attends(prefill(case), case, weights=WEIGHT_ROUNDING[shape.dtype])


def test_a_cache_of_other_strides() -> None:
    case = attention(dataclasses.replace(CHUNKS, lengths=((20, 70), (3, 16))))
    assert_attends(prefill(dataclasses.replace(case, kv=slot_major(case.kv))), case)


@given(split=st.integers(1, 69))
def test_chunks_equal_the_whole(split: int) -> None:
    """The second chunk sees the first one's keys: whatever the cut, the same answers."""
    case = attention(dataclasses.replace(CHUNKS, lengths=((70, 70),), num_kv_heads=1, group=2))
    tables = case.block_tables.repeat(2, 1)
    lengths = torch.tensor([split, 70], dtype=torch.int32)
    starts = torch.tensor([0, split, 70], dtype=torch.int32)
    out = paged_prefill(case.q, case.kv, tables, starts, lengths, case.scale, backend="triton")
    assert_attends(out, case)
