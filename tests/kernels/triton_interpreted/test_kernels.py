"""The Triton kernels against float64. Interpreted programs are slow, so each case is small and holds many edges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels import gelu_mul, kv_write, paged_decode, paged_prefill, rms_norm, rope, sampling, silu_mul
from tests.kernels.cases import Shape, assert_close, attention, float64

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Attention rounds its weights to the values' dtype before the second product, as tensor cores want them.
WEIGHT_ROUNDING = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 8e-3}

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


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
PREFILL_SHAPES = [
    *(
        dataclasses.replace(shape(torch.float32, (70, 180), (1, 17), (5, 5)), sliding_window=window, soft_cap=cap)
        for window, cap in LIMITS
    ),
    *(shape(dtype, (70, 80), (1, 17), (5, 5)) for dtype in DTYPES),
    dataclasses.replace(shape(torch.float32, (3, 66)), group=1, head_dim=128, block_size=8),
    dataclasses.replace(shape(torch.float32, (9, 33)), num_kv_heads=1, group=4, head_dim=72, block_size=32),
]


@pytest.mark.parametrize("drawn", DECODE_SHAPES, ids=str)
def test_paged_decode(drawn: Shape) -> None:
    case = attention(drawn)
    out = paged_decode.paged_decode(
        *(case.q, case.k_cache, case.v_cache, case.block_tables, case.context_lens, case.scale),
        **case.limits,
        backend="triton",
    )
    assert_close(out, case.expected, extra=WEIGHT_ROUNDING[drawn.dtype])


def test_paged_decode_gives_zeros_for_padding_rows() -> None:
    case = attention(shape(torch.float32, (1, 5), (1, 9)))
    case.context_lens[0] = 0
    out = paged_decode.paged_decode(
        case.q, case.k_cache, case.v_cache, case.block_tables, case.context_lens, case.scale, backend="triton"
    )
    assert out[0].eq(0).all()
    assert_close(out[1], case.expected[1])


@pytest.mark.parametrize("drawn", PREFILL_SHAPES, ids=str)
def test_paged_prefill(drawn: Shape) -> None:
    case = attention(drawn)
    out = paged_prefill.paged_prefill(
        *(case.q, case.k_cache, case.v_cache, case.block_tables, case.cu_seqlens, case.context_lens, case.scale),
        **case.limits,
        backend="triton",
    )
    assert_close(out, case.expected, extra=WEIGHT_ROUNDING[drawn.dtype])


def test_offsets_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of more than 2^31 elements, virtual only: untouched memory costs nothing."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    num_blocks = 2**31 // (2 * 2 * 16 * 64) + 8
    k_cache, v_cache = torch.empty(num_blocks, 2, 2, 16, 64, dtype=torch.float16).unbind(1)
    k, v = torch.randn(2, 20, 2, 64).half()
    table = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, i // 16]) * 16 + i % 16 for i in range(20)])
    kv_write.kv_write(k, v, k_cache, v_cache, slots, backend="triton")
    q, length = torch.randn(1, 2, 64).half(), torch.tensor([20], dtype=torch.int32)
    decoded = paged_decode.paged_decode(q, k_cache, v_cache, table, length, 0.1, backend="triton")
    prefilled = paged_prefill.paged_prefill(
        *(q, k_cache, v_cache, table, torch.tensor([0, 1], dtype=torch.int32), length, 0.1), backend="triton"
    )
    scores = np.einsum("hd,thd->ht", float64(q[0]), float64(k)) * 0.1
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    expected = np.einsum("ht,thd->hd", weights, float64(v))[None]
    assert_close(decoded, expected, extra=1e-3)
    assert_close(prefilled, expected, extra=1e-3)


@every_dtype
def test_kv_write(dtype: torch.dtype) -> None:
    cache = torch.full((4, 2, 2, 3, 16, 20), torch.nan, dtype=dtype)
    wide = torch.randn(4, 7, 20).to(dtype)
    slots = torch.tensor([63, -1, 0, 17])
    expected = cache.clone()
    for token, slot in ((0, 63), (2, 0), (3, 17)):
        expected[slot // 16, 1, 0, :, slot % 16] = wide[token, :3]
        expected[slot // 16, 1, 1, :, slot % 16] = wide[token, 3:6]
    kv_write.kv_write(wide[:, :3], wide[:, 3:6], cache[:, 1, 0], cache[:, 1, 1], slots, backend="triton")
    assert torch.equal(cache.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@every_dtype
def test_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(5, 603).to(dtype)[:, :600],
        torch.randn(5, 600).to(dtype),
        torch.randn(600).to(dtype),
    )
    total = (x.double() + residual.double()).to(dtype)
    normed, new_residual = rms_norm.fused_add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    assert torch.equal(new_residual, total)
    for actual, source in ((normed, total), (rms_norm.rms_norm(x, weight, 1e-5, backend="triton"), x)):
        wide = float64(source)
        assert_close(actual, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * float64(weight))


@every_dtype
def test_rope(dtype: torch.dtype) -> None:
    qkv, positions = torch.randn(6, 15, 72).to(dtype), torch.tensor([0, 49, 3, 3, 7, 11])
    angles = torch.rand(50, 36) * 6
    cos, sin, before = angles.cos(), angles.sin(), float64(qkv)
    rope.rope(qkv[:, :9], qkv[:, 9:12], positions, cos, sin, backend="triton")
    first, second = before[..., :36], before[..., 36:]
    c, s = float64(cos[positions])[:, None], float64(sin[positions])[:, None]
    expected = np.concatenate((first * c - second * s, second * c + first * s), axis=-1)
    assert_close(qkv[:, :12], expected[:, :12])
    assert np.array_equal(float64(qkv[:, 12:]), before[:, 12:])


@every_dtype
@pytest.mark.parametrize("columns", [96, 1100])
def test_silu_mul(dtype: torch.dtype, columns: int) -> None:
    gate_up = (torch.randn(3, 2 * columns + 5) * 4).to(dtype)[:, : 2 * columns]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    assert_close(silu_mul.silu_mul(gate_up, backend="triton"), gate / (1 + np.exp(-gate)) * up)


@every_dtype
def test_gelu_mul(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 1105) * 4).to(dtype)[:, :1100]
    gate, up = np.split(float64(gate_up), 2, axis=1)
    twice = np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
    assert_close(gelu_mul.gelu_mul(gate_up, backend="triton"), gate / (1 + np.exp(np.minimum(-twice, 700.0))) * up)


def test_filters_equal_the_reference() -> None:
    logits = torch.randn(8, 300) * 3
    logits[:4] = logits[:4].round()  # ties, zeros of both signs among them
    logits[4, 50:] = -torch.inf
    expected = logits.clone()
    arguments = (
        [5, 0, 40, 0, 60, 1, 400, 0],
        [1.0, 0.7, 0.6, 0.3, 0.9, 0.5, 0.999, 1.0],
        [0.0, 0.1, 0.0, 0, 0, 0, 0, 0.5],
    )
    sampling.filter_logits(logits, *arguments, backend="triton")
    sampling.filter_logits(expected, *arguments, backend="reference")
    assert torch.equal(logits, expected)


def test_filters_and_draw_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton import sampling as triton_sampling

    monkeypatch.setattr(triton_sampling, "_MAX_BLOCK", 32)
    logits = torch.randn(1, 100).round()
    expected = logits.clone()
    sampling.filter_logits(logits, [60], [0.9], [0.0], backend="triton")
    sampling.filter_logits(expected, [60], [0.9], [0.0], backend="reference")
    assert torch.equal(logits, expected)

    weights = torch.tensor([0.0, 0.25, 1.0, 3.0]).repeat(6, 20)[:, :70]
    numbers = [0.0, 0.1, 0.4, 0.77, 0.999, 1.0 - 2.0**-53]
    drawn = sampling.draw(weights, numbers, backend="triton")
    assert torch.equal(drawn, sampling.draw(weights, numbers, backend="reference"))
