from __future__ import annotations

import pytest
import torch

from kernels.kv_cache import PagedKV


def test_it_knows_its_shape() -> None:
    kv = PagedKV(*torch.zeros(8, 2, 3, 16, 64).unbind(1))
    assert (kv.num_blocks, kv.num_heads, kv.block_size, kv.head_dim) == (8, 3, 16, 64)


@pytest.mark.parametrize(
    ("k", "v", "error", "message"),
    [
        (torch.zeros(8, 3, 64), torch.zeros(8, 3, 64), ValueError, r"kv.k has shape \(8, 3, 64\)"),
        (
            torch.zeros(8, 3, 16, 64),
            torch.zeros(8, 3, 16, 32),
            ValueError,
            r"kv.v has shape .* expected \(8, 3, 16, 64",
        ),
        (torch.zeros(8, 3, 16, 64), torch.zeros(8, 3, 16, 64).half(), TypeError, "kv.v has dtype torch.float16"),
        (torch.zeros(8, 3, 16, 128)[..., ::2], torch.zeros(8, 3, 16, 64), ValueError, "kv.k has stride 2 in its last"),
        (
            torch.zeros(8, 3, 16, 64),
            torch.zeros(8, 2, 3, 16, 64)[:, 0],
            ValueError,
            "kv.v has strides .* expected kv.k",
        ),
    ],
)
def test_wrong_arguments_are_named(k: torch.Tensor, v: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PagedKV(k, v)
