from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kernels.paged_prefill import paged_prefill
from tests.kernels.backends import every_backend, every_cpu, using
from tests.kernels.cases import Attention, Shape, assert_attends, attention, shapes, weight_rounding

SHAPE = Shape(3, 3, 64, 16, torch.float32, ((40, 40), (5, 37), (1, 16)), seed=7)


def prefill(case: Attention, implementation: str) -> torch.Tensor:
    with using(implementation) as backend:
        return paged_prefill(
            *(case.q, case.kv, case.block_tables, case.cu_seqlens, case.context_lens, case.scale),
            **case.limits,
            backend=backend,
        )


@every_backend
@given(shape=shapes(max_new=70, max_context=300, dtypes=(torch.float32, torch.bfloat16)))
@settings(max_examples=15, deadline=None)
def test_equals_dense_attention(implementation: str, shape: Shape) -> None:
    case = attention(shape)
    assert_attends(prefill(case, implementation), case, weights=weight_rounding(implementation, shape.dtype))


@every_backend
def test_a_long_prompt(implementation: str) -> None:
    case = attention(dataclasses.replace(SHAPE, num_kv_heads=1, lengths=((577, 600),)))
    assert_attends(prefill(case, implementation), case)


@every_backend
@pytest.mark.parametrize("head_dim", [20, 64, 264])
def test_float32_over_a_bfloat16_cache(implementation: str, head_dim: int) -> None:
    case = attention(dataclasses.replace(SHAPE, dtype=torch.float32, kv_dtype=torch.bfloat16, head_dim=head_dim))
    assert_attends(prefill(case, implementation), case)


@every_backend
@pytest.mark.parametrize("head_dim", [8, 20, 72, 80, 96, 256, 264])
@pytest.mark.parametrize("group", [2, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unusual_head_dimensions_and_groups(implementation: str, head_dim: int, group: int, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(SHAPE, head_dim=head_dim, group=group, num_kv_heads=2, dtype=dtype)
    case = attention(dataclasses.replace(shape, lengths=((9, 30), (4, 4))))
    assert_attends(prefill(case, implementation), case, weights=weight_rounding(implementation, dtype))


@every_backend
def test_scores_far_apart_do_not_overflow(implementation: str) -> None:
    case = attention(SHAPE, scale=40.0)
    assert_attends(prefill(case, implementation), case)


@every_backend
@pytest.mark.parametrize("head_dim", [20, 264])
@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(1, None), (17, None), (60, 5.0), (1000, None), (None, 0.5)])
def test_windows_and_soft_caps(
    implementation: str, head_dim: int, sliding_window: int | None, soft_cap: float | None
) -> None:
    lengths = ((100, 200), (9, 150), (70, 70))
    shape = dataclasses.replace(SHAPE, lengths=lengths, group=1, sliding_window=sliding_window, soft_cap=soft_cap)
    case = attention(dataclasses.replace(shape, head_dim=head_dim), scale=4 * head_dim**-0.5)  # scores past the caps
    assert_attends(prefill(case, implementation), case)


@every_backend
def test_a_sequence_without_new_tokens_is_left_out(implementation: str) -> None:
    case = attention(SHAPE)
    cu_seqlens = torch.tensor([0, 40, 40, 45, 46], dtype=torch.int32)
    rows = torch.tensor([0, 0, 1, 2])
    case = dataclasses.replace(
        case, cu_seqlens=cu_seqlens, block_tables=case.block_tables[rows], context_lens=case.context_lens[rows]
    )
    assert_attends(prefill(case, implementation), case)


@every_backend
def test_no_tokens_at_all(implementation: str) -> None:
    case = attention(SHAPE)
    zeros = torch.zeros(4, dtype=torch.int32)
    assert prefill(dataclasses.replace(case, q=case.q[:0], cu_seqlens=zeros), implementation).shape == (0, 9, 64)


@every_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sliding_window", [None, 20, 70])
def test_chunks_give_the_bits_of_the_whole(implementation: str, sliding_window: int | None, dtype: torch.dtype) -> None:
    shape = dataclasses.replace(SHAPE, lengths=((200, 200),), sliding_window=sliding_window, dtype=dtype)
    whole = attention(shape)
    expected = prefill(whole, implementation)
    for start, end in ((0, 33), (33, 34), (34, 100), (100, 200)):
        chunk = dataclasses.replace(
            whole,
            q=whole.q[start:end],
            cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
        )
        assert prefill(chunk, implementation).equal(expected[start:end])


def test_threads_change_nothing() -> None:
    case = attention(dataclasses.replace(SHAPE, lengths=((150, 200), (20, 90), (1, 300))))
    alone = prefill(case, "cpu")
    torch.set_num_threads(3)
    assert prefill(case, "cpu").equal(alone)


@every_backend
@pytest.mark.parametrize("block", [-1, 1_000])
def test_a_block_outside_the_cache_is_refused(implementation: str, block: int) -> None:
    case = attention(SHAPE)
    case.block_tables[0, 2] = block
    with pytest.raises(IndexError):
        prefill(case, implementation)


@pytest.mark.parametrize("cu_seqlens", [[0, 40, 45, 45], [1, 40, 45, 46], [0, 45, 40, 46], [0, 1, 45, 46]])
def test_sequences_that_do_not_fit_their_tokens_are_refused(cu_seqlens: list[int]) -> None:
    case = dataclasses.replace(attention(SHAPE), cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))
    with pytest.raises(IndexError, match="do not run from 0 to 46"):
        prefill(case, "cpu")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"cu_seqlens has shape \(3,\), expected \(4\)"),
        ({"cu_seqlens": torch.zeros(4, dtype=torch.int64)}, TypeError, "cu_seqlens has dtype torch.int64"),
        ({"q": torch.zeros(46, 576)}, ValueError, r"q has shape \(46, 576\)"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prefill(dataclasses.replace(attention(SHAPE), **change), "reference")
