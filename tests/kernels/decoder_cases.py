"""Decoders of random weights and shapes, batches and caches for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from kernels.decoder import (
    Activation,
    AttentionStage,
    Decoder,
    Ends,
    ExpertsStage,
    MlpStage,
    MlpWeights,
    Stage,
)
from kernels.flat_batch import FlatBatch
from kernels.kv_cache import PagedKV
from kernels.linear import LinearWeights
from kernels.quantized import QuantizedMatrix
from tests.kernels.quantized_cases import Format, make_matrix

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
NUM_BLOCKS, BLOCK_SIZE, NUM_POSITIONS, VOCAB = 40, 4, 64, 30


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    hidden: int = 40
    inner: int = 56
    dtype: torch.dtype = FLOAT32
    weights_dtype: torch.dtype = BFLOAT16
    bias: bool = False
    head_norms: bool = False
    sandwich_norms: bool = False
    experts: bool = False  # in every second layer
    window: int | None = None
    soft_cap: float | None = None
    activation: Activation = "silu"
    gate_up_as_one: bool = False
    quantized: Format | None = None  # all weights of the layers

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


def make_decoder(shape: Shape, num_layers: int = 2) -> Decoder:
    stages: list[Stage] = []
    for layer in range(num_layers):
        stages += [_attention(shape, layer), _experts(shape) if shape.experts and layer % 2 else _mlp_stage(shape)]
    return Decoder(tuple(stages), shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-5)


def _norm(shape: Shape, size: int, wanted: bool = True) -> torch.Tensor | None:
    return 1 + 0.1 * torch.randn(size).to(shape.dtype) if wanted else None


def _norms(shape: Shape, first: bool = False) -> dict[str, Any]:
    wanted = shape.sandwich_norms and not first
    return {"delta_norm": _norm(shape, shape.hidden, wanted), "norm": _norm(shape, shape.hidden)}


def make_linear(shape: Shape, columns: int, *rows: int) -> LinearWeights:
    return LinearWeights(
        tuple(_make_matrix(shape, n, columns) for n in rows),
        torch.randn(sum(rows)).to(shape.dtype) if shape.bias else None,
    )


def _make_matrix(shape: Shape, rows: int, columns: int) -> torch.Tensor | QuantizedMatrix:
    if shape.quantized is not None:
        return make_matrix(rows, columns, shape.quantized)[0]
    values: torch.Tensor = torch.randn(rows, columns) * columns**-0.5
    return values.to(shape.weights_dtype)


def _attention(shape: Shape, layer: int) -> AttentionStage:
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    angles = torch.rand(NUM_POSITIONS, shape.head_dim // 2) * 6
    return AttentionStage(
        **_norms(shape, first=layer == 0),
        qkv=make_linear(shape, shape.hidden, query, kv, kv),
        query_norm=_norm(shape, shape.head_dim, shape.head_norms),
        key_norm=_norm(shape, shape.head_dim, shape.head_norms),
        cos=angles.cos(),
        sin=angles.sin(),
        scale=shape.head_dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
        output=make_linear(shape, query, shape.hidden),
    )


def _mlp(shape: Shape) -> MlpWeights:
    rows = (2 * shape.inner,) if shape.gate_up_as_one else (shape.inner, shape.inner)
    return MlpWeights(make_linear(shape, shape.hidden, *rows), make_linear(shape, shape.inner, shape.hidden))


def _mlp_stage(shape: Shape) -> MlpStage:
    return MlpStage(**_norms(shape), weights=_mlp(shape), activation=shape.activation)


def _experts(shape: Shape) -> ExpertsStage:
    return ExpertsStage(
        **_norms(shape),
        router=make_linear(shape, shape.hidden, 3),
        experts=tuple(_mlp(shape) for _ in range(3)),
        num_active=2,
        normalised=True,
        activation=shape.activation,
    )


def make_ends(shape: Shape, scale: float = 1.0) -> Ends:
    return Ends(
        embedding=torch.randn(VOCAB, shape.hidden).to(BFLOAT16 if shape.dtype == BFLOAT16 else shape.weights_dtype),
        embedding_scale=scale,
        delta_norm=_norm(shape, shape.hidden, shape.sandwich_norms),
        norm=torch.rand(shape.hidden).to(shape.dtype),
        head=make_linear(shape, shape.hidden, VOCAB),
    )


def make_batch(decode_contexts: tuple[int, ...], prefills: tuple[tuple[int, int], ...]) -> FlatBatch:
    """Sequences of (new tokens, context), each in blocks of its own, taken from the end of the cache."""
    sequences = [*((1, context) for context in decode_contexts), *prefills]
    free = iter(range(NUM_BLOCKS - 1, -1, -1))
    tables = [list(itertools.islice(free, -(-context // BLOCK_SIZE))) for _, context in sequences]
    positions = [p for new, context in sequences for p in range(context - new, context)]
    owners = [i for i, (new, _) in enumerate(sequences) for _ in range(new)]
    slots = [tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in zip(owners, positions, strict=True)]
    width = max(map(len, tables))
    padded = torch.tensor([table + [-1] * (width - len(table)) for table in tables], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    num_decodes = len(decode_contexts)
    return FlatBatch(
        token_ids=torch.randint(VOCAB, (len(positions),)),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        sample_rows=torch.arange(len(positions)),
        decode_block_tables=padded[:num_decodes],
        decode_context_lens=contexts[:num_decodes],
        prefill_block_tables=padded[num_decodes:],
        prefill_context_lens=contexts[num_decodes:],
        prefill_cu_seqlens=torch.tensor([0, *itertools.accumulate(new for new, _ in prefills)], dtype=torch.int32),
    )


def make_caches(shape: Shape, num_layers: int = 2) -> tuple[PagedKV, ...]:
    kv = torch.randn(NUM_BLOCKS, num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim).to(shape.dtype)
    return tuple(PagedKV(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(num_layers))


def copied(caches: tuple[PagedKV, ...]) -> tuple[PagedKV, ...]:
    return tuple(PagedKV(kv.k.clone(), kv.v.clone()) for kv in caches)


def same_caches(some: tuple[PagedKV, ...], others: tuple[PagedKV, ...]) -> bool:
    return all(torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in zip(some, others, strict=True))


def random_stream(shape: Shape, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """delta, residual"""
    size = (batch.num_tokens, shape.hidden)
    return torch.randn(size).to(shape.dtype), torch.randn(size).to(shape.dtype)


shapes = st.builds(
    Shape,
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 16, 20, 64]),
    hidden=st.sampled_from([31, 40, 64]),
    inner=st.sampled_from([24, 57, 128]),
    dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    weights_dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    bias=st.booleans(),
    head_norms=st.booleans(),
    sandwich_norms=st.booleans(),
    experts=st.booleans(),
    window=st.sampled_from([None, 1, 5]),
    soft_cap=st.sampled_from([None, 3.0]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    gate_up_as_one=st.booleans(),
)
