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


def test_in_bfloat16_it_goes_with_float32_too() -> None:
    kv = PagedKV(*torch.zeros(8, 2, 3, 16, 64, dtype=torch.bfloat16).unbind(1))
    assert not kv.quantised
    for dtype in (torch.float32, torch.bfloat16):
        kv.check_query(torch.zeros(2, 6, 64, dtype=dtype))
    with pytest.raises(TypeError, match=r"q has dtype torch.float16, expected one of torch.bfloat16, torch.float32"):
        kv.check_query(torch.zeros(2, 6, 64, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"q has dtype torch.bfloat16, expected torch.float32"):
        PagedKV(kv.k.float(), kv.v.float()).check_query(torch.zeros(2, 6, 64, dtype=torch.bfloat16))


def test_quantised_it_has_scales() -> None:
    k, v = torch.zeros(8, 2, 3, 16, 64, dtype=torch.int8).unbind(1)
    k_scales, v_scales = torch.zeros(8, 2, 3, 16).unbind(1)
    kv = PagedKV(k, v, k_scales, v_scales)
    part = kv.of_heads(range(1, 3))
    assert part.quantised
    assert part.k_scales is not None
    assert part.k_scales.data_ptr() == k_scales[:, 1].data_ptr()
    for float_dtype in (torch.float32, torch.bfloat16):
        kv.check_query(torch.zeros(2, 6, 64, dtype=float_dtype))
    with pytest.raises(TypeError, match=r"q has dtype torch.int8, expected one of torch.float32, torch.bfloat16"):
        kv.check_query(torch.zeros(2, 6, 64, dtype=torch.int8))
    wrong: list[tuple[torch.Tensor | None, torch.Tensor | None, type[Exception], str]] = [
        (None, None, ValueError, "kv of torch.int8: expected scales of both K and V where it is quantised, else none"),
        (k_scales, None, ValueError, "expected scales of both"),
        (k_scales[:, 1:], v_scales, ValueError, r"kv.k_scales has shape \(8, 2, 16\), expected \(8, 3, 16\)"),
        (k_scales.half(), v_scales, TypeError, "kv.k_scales has dtype torch.float16"),
        (k_scales, v_scales.contiguous(), ValueError, "kv.v_scales has strides"),
    ]
    for first, second, error, message in wrong:
        with pytest.raises(error, match=message):
            PagedKV(k, v, first, second)
    with pytest.raises(ValueError, match=r"kv of torch.float32: expected scales"):
        PagedKV(k.float(), v.float(), k_scales, v_scales)
