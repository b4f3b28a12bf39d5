from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kernels.paged_decode import paged_decode
from tests.kernels.backends import every_backend, using
from tests.kernels.cases import Attention, Shape, assert_attends, attention, shapes, weight_rounding

SHAPE = Shape(3, 3, 64, 16, torch.float32, ((1, 40), (1, 16), (1, 1)), seed=7)


def decode(case: Attention, implementation: str) -> torch.Tensor:
    with using(implementation) as backend:
        return paged_decode(
            *(case.q, case.kv, case.block_tables, case.context_lens, case.scale),
            **case.limits,
            backend=backend,
        )


@every_backend
@given(shape=shapes(max_new=1, dtypes=(torch.float32, torch.bfloat16)))
@settings(max_examples=25, deadline=None)
def test_equals_dense_attention(implementation: str, shape: Shape) -> None:
    case = attention(shape)
    assert_attends(decode(case, implementation), case, weights=weight_rounding(implementation, shape.dtype))


@every_backend
@pytest.mark.parametrize("head_dim", [20, 64, 264])
def test_float32_over_a_bfloat16_cache(implementation: str, head_dim: int) -> None:
    case = attention(dataclasses.replace(SHAPE, dtype=torch.float32, kv_dtype=torch.bfloat16, head_dim=head_dim))
    assert_attends(decode(case, implementation), case)


@every_backend
@pytest.mark.parametrize("head_dim", [8, 20, 72, 80, 96, 256, 264])
@pytest.mark.parametrize("group", [2, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unusual_head_dimensions_and_groups(implementation: str, head_dim: int, group: int, dtype: torch.dtype) -> None:
    case = attention(dataclasses.replace(SHAPE, head_dim=head_dim, group=group, num_kv_heads=2, dtype=dtype))
    assert_attends(decode(case, implementation), case, weights=weight_rounding(implementation, dtype))


@every_backend
def test_scores_far_apart_do_not_overflow(implementation: str) -> None:
    case = attention(SHAPE, scale=40.0)
    assert_attends(decode(case, implementation), case)


@every_backend
def test_padding_rows_without_context_give_zeros(implementation: str) -> None:
    case = attention(SHAPE)
    case.context_lens[1] = 0
    out = decode(case, implementation)
    assert out[1].eq(0).all()
    assert_attends(out[[0, 2]], case, rows=[0, 2])


@every_backend
@pytest.mark.parametrize("head_dim", [20, 264])
@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(1, None), (17, None), (33, 5.0), (1000, None), (None, 0.5)])
def test_windows_and_soft_caps(
    implementation: str, head_dim: int, sliding_window: int | None, soft_cap: float | None
) -> None:
    shape = dataclasses.replace(SHAPE, head_dim=head_dim, sliding_window=sliding_window, soft_cap=soft_cap)
    case = attention(shape, scale=4 * head_dim**-0.5)  # scores past the caps
    assert_attends(decode(case, implementation), case)


def test_float64_is_computed_in_float64() -> None:
    case = attention(dataclasses.replace(SHAPE, dtype=torch.float64))
    out = paged_decode(case.q, case.kv, case.block_tables, case.context_lens, case.scale)
    torch.testing.assert_close(out, torch.from_numpy(case.expected), rtol=1e-12, atol=1e-12)


def test_threads_change_nothing() -> None:
    case = attention(dataclasses.replace(SHAPE, lengths=((1, 300),) * 7))
    alone = decode(case, "cpu")
    torch.set_num_threads(3)
    assert decode(case, "cpu").equal(alone)


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    case = attention(SHAPE)
    together = decode(case, "cpu")
    for row in range(3):
        one = slice(row, row + 1)
        alone = dataclasses.replace(
            case, q=case.q[one], block_tables=case.block_tables[one], context_lens=case.context_lens[one]
        )
        assert decode(alone, "cpu").equal(together[one])


@every_backend
@pytest.mark.parametrize("of", ["k_scales", "v_scales"])
def test_a_token_that_was_not_finite_reaches_what_attends_to_it_alone(implementation: str, of: str) -> None:
    case = attention(dataclasses.replace(SHAPE, dtype=torch.bfloat16, kv_dtype=torch.int8))
    getattr(case.kv, of)[case.block_tables[0, 1], 1, 3] = torch.nan
    out = decode(case, implementation)
    poisoned = torch.zeros(3, 9, dtype=torch.bool)
    poisoned[0, 3:6] = True
    assert out.isnan().all(2).equal(poisoned)
    weights = weight_rounding(implementation, torch.bfloat16)
    assert_attends(out[~poisoned], case, weights=weights, rows=~poisoned.numpy())


@every_backend
@pytest.mark.parametrize("block", [-1, 1_000])
def test_a_block_outside_the_cache_is_refused(implementation: str, block: int) -> None:
    case = attention(SHAPE)
    case.block_tables[0, 2] = block
    with pytest.raises(IndexError):
        decode(case, implementation)


@every_backend
def test_a_context_longer_than_its_table_is_refused(implementation: str) -> None:
    case = attention(SHAPE)
    case.context_lens[0] = 16 * case.block_tables.shape[1] + 1
    with pytest.raises(IndexError):
        decode(case, implementation)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, 9, 32)}, ValueError, r"q has shape \(3, 9, 32\), expected \(\*, \*, 64\)"),
        ({"q": torch.zeros(3, 8, 64)}, ValueError, "q has 8 heads, expected a multiple of the cache's 3"),
        (
            {"q": torch.zeros(3, 9, 64).bfloat16()},
            TypeError,
            "q has dtype torch.bfloat16, expected torch.float32",
        ),
        ({"q": torch.zeros(3, 9, 128)[..., ::2]}, ValueError, "q has stride 2 in its last dimension"),
        ({"context_lens": torch.ones(3, dtype=torch.int64)}, TypeError, "context_lens has dtype torch.int64"),
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, r"block_tables has shape \(2, 3\)"),
        ({"limits": {"sliding_window": 0}}, ValueError, "sliding_window = 0: must be at least 1"),
        ({"limits": {"soft_cap": 0.0}}, ValueError, "soft_cap = 0.0: must be above 0"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(dataclasses.replace(attention(SHAPE), **change), "reference")
