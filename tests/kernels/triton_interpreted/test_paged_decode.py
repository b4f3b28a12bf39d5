from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.paged_decode import paged_decode
from kernels.triton import paged_decode as implementation
from tests.kernels.cases import WEIGHT_ROUNDING, Attention, Shape, assert_attends, attention, shapes, slot_major
from tests.kernels.triton_interpreted.precisions import DTYPES

RAGGED = Shape(2, 3, 64, 16, torch.float32, ((1, 1300), (1, 3), (1, 512), (1, 600)), seed=3)


def decode(case: Attention, rows: slice = slice(None)) -> torch.Tensor:
    return paged_decode(
        *(case.q[rows], case.kv, case.block_tables[rows], case.context_lens[rows], case.scale),
        **case.limits,
        backend="triton",
    )


@given(shape=shapes(max_new=1, max_context=4096, dtypes=DTYPES))
@example(shape=dataclasses.replace(RAGGED, sliding_window=1))
@example(shape=dataclasses.replace(RAGGED, sliding_window=600, kv_dtype=torch.int8))
@example(shape=dataclasses.replace(RAGGED, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn))
@example(shape=dataclasses.replace(RAGGED, dtype=torch.float32, kv_dtype=torch.bfloat16))
@example(shape=dataclasses.replace(RAGGED, sliding_window=514, soft_cap=20.0))
@example(shape=dataclasses.replace(RAGGED, num_kv_heads=1, group=20, head_dim=72, block_size=32))
def test_equals_dense_attention(shape: Shape) -> None:
    case = attention(shape)
    assert_attends(decode(case), case, weights=WEIGHT_ROUNDING[shape.dtype])


def test_a_cache_of_other_strides() -> None:
    case = attention(dataclasses.replace(RAGGED, lengths=((1, 70), (1, 16))))
    assert_attends(decode(dataclasses.replace(case, kv=slot_major(case.kv))), case)


@pytest.mark.parametrize("window", [None, 700])
def test_neither_the_batch_nor_the_number_of_programs_changes_a_bit(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ((1, 1300), (1, 3), (1, 512))
    case = attention(dataclasses.replace(RAGGED, num_kv_heads=1, lengths=lengths, sliding_window=window))
    monkeypatch.setattr(implementation, "_PROGRAMS_PER_MULTIPROCESSOR", 1000)
    expected = torch.cat([decode(case, slice(row, row + 1)) for row in range(3)])
    assert torch.equal(decode(case), expected)
    monkeypatch.setattr(implementation, "_PROGRAMS_PER_MULTIPROCESSOR", 2)
    assert torch.equal(decode(case), expected)


def test_many_splits_are_merged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks that rise and fall from split to split."""
    monkeypatch.setattr(implementation, "_SPLIT_TOKENS", 64)
    case = attention(dataclasses.replace(RAGGED, num_kv_heads=1, lengths=((1, 1300), (1, 5))), scale=1.0)
    assert_attends(decode(case), case)


@given(padding=st.lists(st.booleans(), min_size=4, max_size=4))
def test_padding_rows_give_zeros(padding: list[bool]) -> None:
    case = attention(dataclasses.replace(RAGGED, lengths=((1, 5), (1, 513), (1, 9), (1, 16)), num_kv_heads=1))
    case.context_lens[padding] = 0
    out = decode(case)
    assert out[padding].eq(0).all()
    kept = [not row for row in padding]
    assert_attends(out[kept], case, rows=kept)
