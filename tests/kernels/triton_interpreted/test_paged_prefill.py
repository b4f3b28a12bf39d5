from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import paged_prefill
from tests.kernels.cases import Shape, assert_close, attention
from tests.kernels.triton_interpreted.precisions import DTYPES, WEIGHT_ROUNDING


def shape(dtype: torch.dtype, *lengths: tuple[int, int]) -> Shape:
    return Shape(2, 3, 64, 16, dtype, lengths, seed=3)


# (sliding window, soft cap)
LIMITS = [(1, None), (40, None), (100, 20.0), (None, 1.0)]
PREFILL_SHAPES = [
    *(
        dataclasses.replace(shape(torch.float32, (70, 180), (1, 17), (5, 5)), sliding_window=window, soft_cap=cap)
        for window, cap in LIMITS
    ),
    *(shape(dtype, (70, 80), (1, 17), (5, 5)) for dtype in DTYPES),
    dataclasses.replace(shape(torch.float32, (3, 66)), group=1, head_dim=128, block_size=8),
    dataclasses.replace(shape(torch.float32, (9, 33)), num_kv_heads=1, group=4, head_dim=72, block_size=32),
]


@pytest.mark.parametrize("drawn", PREFILL_SHAPES, ids=str)
def test_paged_prefill(drawn: Shape) -> None:
    case = attention(drawn)
    out = paged_prefill.paged_prefill(
        *(case.q, case.kv, case.block_tables, case.cu_seqlens, case.context_lens, case.scale),
        **case.limits,
        backend="triton",
    )
    assert_close(out, case.expected, extra=WEIGHT_ROUNDING[drawn.dtype])
