"""What is compiled: every op that has a Triton implementation, at the shapes, dtypes and options of models.

Only shapes, strides and alignments matter, so batches are tiny; what the ops compute is not looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels.model_shapes import GEMMA_2_9B, LLAMA_3_8B, LLAMA_3_70B, SMOLLM2_135M, ModelShape
from kernels import (
    block_copy,
    gates,
    kv_write,
    linear,
    paged_decode,
    paged_prefill,
    rms_norm,
    rope,
    sampling,
)
from kernels.kv_cache import QUANTISED_DTYPES, PagedKV
from kernels.panels import PANEL
from kernels.quantized import STEP, QuantizedMatrix
from tests.kernels.compiled.targets import TARGETS

BLOCK_SIZE = 16
TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """name: unique. matrix: its products are meant for matrix units. quick_on: targets that CI compiles it for.

    narrow_because: why its loads need not be wide. targets: only those; None: all.
    """

    name: str
    launch: Callable[[], object]
    matrix: bool
    quick_on: frozenset[str] = frozenset()
    narrow_because: str | None = None
    targets: frozenset[str] | None = None


def configurations() -> tuple[Configuration, ...]:
    """All of them, in the order of the table."""
    return (*_attention(), *_quantised_caches(), *_quantised_linears(), *_rowwise(), *_sampling(), *_copies())


def _attention() -> Iterator[Configuration]:
    everywhere, hopper, nowhere = frozenset({"sm_80", "sm_90", "gfx942"}), frozenset({"sm_90"}), frozenset[str]()
    shapes = (
        (LLAMA_3_8B, torch.bfloat16, everywhere),
        (LLAMA_3_70B, torch.bfloat16, nowhere),
        (SMOLLM2_135M, torch.bfloat16, nowhere),
        (GEMMA_2_9B, torch.bfloat16, hopper),
        (LLAMA_3_8B, torch.float32, nowhere),
    )
    ops: tuple[tuple[str, Callable[..., None]], ...] = (("decode", _decode), ("prefill", _prefill))
    for (shape, dtype, quick_on), (op, launch) in itertools.product(shapes, ops):
        yield Configuration(
            name=f"{op} {_label(shape, dtype)}",
            launch=partial(launch, shape, dtype),
            matrix=dtype != torch.float32,  # float32 is computed as IEEE has it
            quick_on=quick_on,
        )


def _quantised_caches() -> Iterator[Configuration]:
    ops: tuple[tuple[str, Callable[..., None]], ...] = (
        ("decode", _decode),
        ("prefill", _prefill),
        ("kv_write", _kv_write),
    )
    for (kind, dtype), (op, launch) in itertools.product((("int8", torch.int8), ("fp8", torch.float8_e4m3fn)), ops):
        yield Configuration(
            name=f"{op} {_label(LLAMA_3_8B, torch.bfloat16)} kv {kind}",
            launch=partial(launch, LLAMA_3_8B, torch.bfloat16, dtype),
            matrix=True,
            quick_on=frozenset({"sm_90"} if kind == "int8" else ()),
            narrow_because="a tile of bytes gives a lane fewer than 16" if op != "kv_write" else None,
            targets=frozenset(TARGETS) - {"sm_80"} if kind == "fp8" else None,  # the compiler has e4m3 from sm_89 on
        )


def _quantised_linears() -> Iterator[Configuration]:
    """The output projection of Llama-3-8B, for a few rows and for many."""
    kinds: tuple[tuple[str, Callable[..., QuantizedMatrix]], ...] = (
        ("int8", _int8_matrix),
        ("int4 by 128", partial(_int4_matrix, group=128)),
        ("int4 by 32 with offsets", partial(_int4_matrix, group=32, offsets=True)),
    )
    for (kind, matrix), rows in itertools.product(kinds, (4, 64)):
        yield Configuration(
            name=f"linear {kind}, {rows} rows",
            launch=partial(_quantised_linear, matrix, rows),
            matrix=True,
            quick_on=frozenset({"sm_90"} if kind == "int4 by 128" else ()),
            narrow_because="a group of 32 columns is 16 bytes of each row" if "by 32" in kind else None,
        )


def _rowwise() -> Iterator[Configuration]:
    ops: tuple[tuple[str, Callable[..., None]], ...] = (
        ("kv_write", _kv_write),
        ("rms_norm", _rms_norm),
        ("fused_add_rms_norm", _fused_add_rms_norm),
        ("rope", _rope),
        ("silu_mul", partial(_gate, gates.silu_mul)),
        ("gelu_mul", partial(_gate, gates.gelu_mul)),
    )
    for shape, (op, launch) in itertools.product((LLAMA_3_8B, SMOLLM2_135M), ops):
        yield Configuration(
            name=f"{op} {_label(shape, torch.bfloat16)}",
            launch=partial(launch, shape),
            matrix=False,
            quick_on=frozenset({"sm_90"} if shape is LLAMA_3_8B else ()),
        )


def _sampling() -> Iterator[Configuration]:
    for op, launch in (("filter", _filter), ("draw", _draw)):
        yield Configuration(
            name=f"{op} {LLAMA_3_8B.name}",
            launch=partial(launch, LLAMA_3_8B),
            matrix=False,
            quick_on=frozenset({"sm_90"}),
        )


def _copies() -> Iterator[Configuration]:
    yield Configuration(name="gather_blocks", launch=_gather, matrix=False, quick_on=frozenset({"sm_90"}))


def _label(shape: ModelShape, dtype: torch.dtype) -> str:
    return f"{shape.name} {str(dtype).removeprefix('torch.')}"


def _cache(shape: ModelShape, dtype: torch.dtype) -> PagedKV:
    """That of the second of three layers; quantised, with its scales."""
    k, v = torch.zeros(8, 3, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim).to(dtype)[:, 1].unbind(1)
    if dtype not in QUANTISED_DTYPES:
        return PagedKV(k, v)
    scales = torch.ones(8, 3, 2, shape.kv_heads, BLOCK_SIZE)[:, 1]
    return PagedKV(k, v, *scales.unbind(1))


def _heads(shape: ModelShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as slices of one projection."""
    heads = torch.zeros(TOKENS, shape.query_heads + 2 * shape.kv_heads, shape.head_dim, dtype=dtype)
    q, k, v = torch.split(heads, [shape.query_heads, shape.kv_heads, shape.kv_heads], dim=1)
    return q, k, v


def _context(num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_sequences, 64, dtype=torch.int32), torch.ones(num_sequences, dtype=torch.int32)


def _decode(shape: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
    q, _, _ = _heads(shape, dtype)
    paged_decode.paged_decode(
        *(q, _cache(shape, kv_dtype or dtype), *_context(TOKENS), 0.1),
        sliding_window=shape.window,
        soft_cap=shape.soft_cap,
        backend="triton",
    )


def _prefill(shape: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
    q, _, _ = _heads(shape, dtype)
    tables, context_lens = _context(2)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    paged_prefill.paged_prefill(
        *(q, _cache(shape, kv_dtype or dtype), tables, starts, context_lens, 0.1),
        sliding_window=shape.window,
        soft_cap=shape.soft_cap,
        backend="triton",
    )


def _quantised_linear(matrix: Callable[[], QuantizedMatrix], rows: int) -> None:
    weights = matrix()
    linear.linear(torch.zeros(rows, weights.columns).bfloat16(), linear.LinearWeights((weights,)), backend="triton")


def _int8_matrix(size: int = LLAMA_3_8B.hidden) -> QuantizedMatrix:
    packed = torch.zeros(size // PANEL, size // STEP, 2, PANEL, 4, dtype=torch.int8)
    return QuantizedMatrix(size, size, packed, torch.ones(size))


def _int4_matrix(group: int, offsets: bool = False, size: int = LLAMA_3_8B.hidden) -> QuantizedMatrix:
    packed = torch.zeros(size // PANEL, size // STEP, PANEL, 4, dtype=torch.uint8)
    scales = torch.ones(size // PANEL, size // group, PANEL).half()
    return QuantizedMatrix(size, size, packed, torch.ones(size), scales, scales if offsets else None)


def _kv_write(shape: ModelShape, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> None:
    _, k, v = _heads(shape, dtype)
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    kv_write.kv_write(k, v, _cache(shape, kv_dtype or dtype), slots, backend="triton")


def _rms_norm(shape: ModelShape) -> None:
    x, weight = torch.zeros(TOKENS, shape.hidden).bfloat16(), torch.zeros(shape.hidden).bfloat16()
    rms_norm.rms_norm(x, weight, 1e-5, backend="triton")


def _fused_add_rms_norm(shape: ModelShape) -> None:
    x, weight = torch.zeros(TOKENS, shape.hidden).bfloat16(), torch.zeros(shape.hidden).bfloat16()
    rms_norm.fused_add_rms_norm(x, x, weight, 1e-5, backend="triton")


def _rope(shape: ModelShape) -> None:
    q, k, _ = _heads(shape, torch.bfloat16)
    angles = torch.zeros(64, shape.head_dim // 2)
    rope.rope(q, k, torch.zeros(TOKENS, dtype=torch.int64), angles, angles, backend="triton")


def _gate(op: Callable[..., torch.Tensor], shape: ModelShape) -> None:
    op(torch.zeros(TOKENS, 2 * shape.inner).bfloat16(), backend="triton")


def _filter(shape: ModelShape) -> None:
    sampling.filter_logits(torch.zeros(2, shape.vocab), [5, 0], [0.9, 0.5], [0.0, 0.1], backend="triton")


def _draw(shape: ModelShape) -> None:
    sampling.draw(torch.zeros(2, shape.vocab).softmax(-1), [0.1, 0.2], backend="triton")


def _gather() -> None:
    blocks = torch.zeros(8, 48 * 1024, dtype=torch.uint8)
    block_copy.gather_blocks(blocks, [5, 1], torch.zeros(2, blocks.shape[1], dtype=torch.uint8), backend="triton")
