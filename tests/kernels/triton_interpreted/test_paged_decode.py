from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import paged_decode
from tests.kernels.cases import Shape, assert_close, attention
from tests.kernels.triton_interpreted.precisions import DTYPES, WEIGHT_ROUNDING


def shape(dtype: torch.dtype, *lengths: tuple[int, int]) -> Shape:
    return Shape(2, 3, 64, 16, dtype, lengths, seed=3)


# (sliding window, soft cap)
LIMITS = [(1, None), (40, None), (100, 20.0), (None, 1.0)]
DECODE_SHAPES = [
    *(
        dataclasses.replace(shape(torch.float32, (1, 530), (1, 65), (1, 16)), sliding_window=window, soft_cap=cap)
        for window, cap in LIMITS
    ),
    *(shape(dtype, (1, 530), (1, 16), (1, 1)) for dtype in DTYPES),
    dataclasses.replace(shape(torch.float32, (1, 65), (1, 64)), group=1, head_dim=128, block_size=8),
    dataclasses.replace(shape(torch.float32, (1, 33)), num_kv_heads=1, group=20, head_dim=72, block_size=32),
]


@pytest.mark.parametrize("drawn", DECODE_SHAPES, ids=str)
def test_paged_decode(drawn: Shape) -> None:
    case = attention(drawn)
    out = paged_decode.paged_decode(
        *(case.q, case.kv, case.block_tables, case.context_lens, case.scale),
        **case.limits,
        backend="triton",
    )
    assert_close(out, case.expected, extra=WEIGHT_ROUNDING[drawn.dtype])


def test_paged_decode_gives_zeros_for_padding_rows() -> None:
    case = attention(shape(torch.float32, (1, 5), (1, 9)))
    case.context_lens[0] = 0
    out = paged_decode.paged_decode(case.q, case.kv, case.block_tables, case.context_lens, case.scale, backend="triton")
    assert out[0].eq(0).all()
    assert_close(out[1], case.expected[1])
