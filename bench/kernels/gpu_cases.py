"""What bench_gpu.py measures: each kernel at the sizes of a model's steps, beside what else computes the same.

A case owns its tensors; cases are made one at a time, so that only one's memory is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels import roofline
from bench.kernels.gpu_peers import Paged, decode_peers, prefill_peers
from bench.kernels.model_shapes import ModelShape
from bench.kernels.roofline import BFLOAT16, INT4, INT4_GROUP, KV8, Step, Work
from kernels import block_copy, gates, kv_write, paged_decode, paged_prefill, rms_norm, rope, sampling
from kernels.kv_cache import PagedKV
from kernels.linear import LinearWeights, linear
from kernels.panels import PANEL
from kernels.quantized import STEP, QuantizedMatrix

BLOCK_SIZE = 16
OURS = "ours"
DTYPE = torch.bfloat16

Implementations = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured of a model: the real run's sizes, or a test's tiny ones."""

    decodes: tuple[Step, ...]
    prefills: tuple[Step, ...]
    rows: tuple[int, ...]  # tokens of the ops that pass over rows, and of linears
    few_rows: tuple[int, ...]  # tokens of linears over int4 weights
    sampled: int
    copied_blocks: int


FULL = Sizes(
    decodes=tuple(Step(sequences=b, new=1, context=c) for c in (1024, 8192) for b in (1, 16, 64, 256)),
    prefills=(
        *(Step(sequences=1, new=n, context=n) for n in (1024, 8192)),
        Step(sequences=1, new=1024, context=8192),
        Step(sequences=8, new=1024, context=1024),
    ),
    rows=(1, 64, 8192),
    few_rows=(1, 16, 64),
    sampled=64,
    copied_blocks=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Kernels that run one after the other; `implementations` has OURS first, then whoever else there is."""

    name: str
    works: tuple[Work, ...]
    implementations: Implementations


def cases(shape: ModelShape, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One after the other; a case's tensors are freed when the next one is asked for."""
    makers: list[Callable[[], Case]] = [
        *(partial(_decode, shape, step, device) for step in sizes.decodes),
        *(partial(_quantised_decode, shape, step, device) for step in sizes.decodes),
        *(partial(_prefill, shape, step, device) for step in sizes.prefills),
        *(
            partial(_linear, name, rows, columns, tokens, device)
            for (name, rows, columns), tokens in itertools.product(shape.linears, sizes.rows)
        ),
        *(
            partial(_quantised_linear, name, rows, columns, tokens, device)
            for (name, rows, columns), tokens in itertools.product(shape.linears, sizes.few_rows)
        ),
        *(partial(make, shape, tokens, device) for make in (_norm, _rope, _gate, _write) for tokens in sizes.rows),
        partial(_sample, shape, sizes.sampled, device),
        partial(_gather, shape, sizes.copied_blocks, device),
    ]
    for make in makers:
        yield make()


def _decode(shape: ModelShape, step: Step, device: torch.device) -> Case:
    paged = _paged(shape, step, device)
    run = partial(
        paged_decode.paged_decode,
        *(paged.q, paged.kv, paged.block_tables, paged.context_lens, paged.scale),
        sliding_window=shape.window,
        soft_cap=shape.soft_cap,
    )
    return _case(
        roofline.decode_attention(shape, step, BFLOAT16),
        step.name,
        {OURS: run, **decode_peers(paged)},
    )


def _quantised_decode(shape: ModelShape, step: Step, device: torch.device) -> Case:
    """Over an int8 cache, beside our own over a bfloat16 one."""
    paged = _paged(shape, step, device)
    k, v = (torch.randint_like(cache, -127, 128, dtype=torch.int8) for cache in (paged.kv.k, paged.kv.v))
    k_scales, v_scales = torch.rand(2, *k.shape[:3], device=device) / 127
    run = partial(paged_decode.paged_decode, paged.q, block_tables=paged.block_tables, context_lens=paged.context_lens)
    limits = {"scale": paged.scale, "sliding_window": shape.window, "soft_cap": shape.soft_cap}
    return _case(
        replace(roofline.decode_attention(shape, step, KV8), name="paged_decode int8"),
        step.name,
        {
            OURS: partial(run, kv=PagedKV(k, v, k_scales, v_scales), **limits),
            "bf16": partial(run, kv=paged.kv, **limits),
        },
    )


def _prefill(shape: ModelShape, step: Step, device: torch.device) -> Case:
    paged = _paged(shape, step, device)
    starts = torch.arange(step.sequences + 1, dtype=torch.int32, device=device) * step.new
    run = partial(
        paged_prefill.paged_prefill,
        *(paged.q, paged.kv, paged.block_tables, starts, paged.context_lens, paged.scale),
        sliding_window=shape.window,
        soft_cap=shape.soft_cap,
    )
    return _case(
        roofline.prefill_attention(shape, step, BFLOAT16),
        f"{step.name} x {step.sequences}",
        {OURS: run, **prefill_peers(paged)},
    )


def _paged(shape: ModelShape, step: Step, device: torch.device) -> Paged:
    """Random queries over contexts whose blocks lie in random order."""
    per_sequence = -(-step.context // BLOCK_SIZE)
    num_blocks = step.sequences * per_sequence
    cache = _random(device, num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    tables = torch.randperm(num_blocks, device=device).view(step.sequences, per_sequence).to(torch.int32)
    return Paged(
        q=_random(device, step.tokens, shape.query_heads, shape.head_dim),
        cache=cache,
        kv=PagedKV(cache[:, 0], cache[:, 1]),
        block_tables=tables,
        context_lens=torch.full((step.sequences,), step.context, dtype=torch.int32, device=device),
        num_new=step.new,
        context=step.context,
        scale=shape.head_dim**-0.5,
    )


def _linear(name: str, rows: int, columns: int, tokens: int, device: torch.device) -> Case:
    x, weight = _random(device, tokens, columns), _random(device, rows, columns)
    return _case(
        roofline.linear(name, tokens, rows, columns, BFLOAT16.weight_bytes),
        f"{tokens} rows",
        {
            OURS: partial(linear, x, LinearWeights((weight,))),
            "torch": partial(F.linear, x, weight),
        },
    )


def _quantised_linear(name: str, rows: int, columns: int, tokens: int, device: torch.device) -> Case:
    """int4 by groups of 128 as kernels/quantized.py packs them, beside torch over bfloat16 weights of that shape."""
    x = _random(device, tokens, columns)
    panels, steps, groups = -(-rows // PANEL), -(-columns // STEP), -(-columns // INT4_GROUP)
    matrix = QuantizedMatrix(
        rows=rows,
        columns=columns,
        packed=torch.randint(0, 256, (panels, steps, PANEL, 4), dtype=torch.uint8, device=device),
        row_scales=torch.ones(panels * PANEL, device=device),
        scales=torch.rand(panels, groups, PANEL, device=device).half() * columns**-0.5,
    )
    return _case(
        roofline.linear(f"int4 {name}", tokens, rows, columns, INT4.weight_bytes),
        f"{tokens} rows",
        {
            OURS: partial(linear, x, LinearWeights((matrix,))),
            "torch bf16": partial(F.linear, x, _random(device, rows, columns)),
        },
    )


def _norm(shape: ModelShape, tokens: int, device: torch.device) -> Case:
    x, residual = _random(device, tokens, shape.hidden), _random(device, tokens, shape.hidden)
    weight = _random(device, shape.hidden)
    return _case(
        roofline.rms_norm(shape, tokens),
        f"{tokens} rows",
        {
            OURS: partial(rms_norm.fused_add_rms_norm, x, residual, weight, 1e-5),
            "torch": lambda: F.rms_norm(x + residual, (shape.hidden,), weight, 1e-5),
        },
    )


def _rope(shape: ModelShape, tokens: int, device: torch.device) -> Case:
    heads = _random(device, tokens, shape.query_heads + 2 * shape.kv_heads, shape.head_dim)
    q, k, _ = torch.split(heads, [shape.query_heads, shape.kv_heads, shape.kv_heads], dim=1)
    angles = torch.rand(tokens, shape.head_dim // 2, device=device)
    positions = torch.arange(tokens, device=device)
    return _case(
        roofline.rope(shape, tokens),
        f"{tokens} rows",
        {OURS: partial(rope.rope, q, k, positions, angles.cos(), angles.sin())},
    )


def _gate(shape: ModelShape, tokens: int, device: torch.device) -> Case:
    gate_up = _random(device, tokens, 2 * shape.inner)
    return _case(
        roofline.silu_mul(shape, tokens),
        f"{tokens} rows",
        {
            OURS: partial(gates.silu_mul, gate_up),
            "torch": lambda: F.silu(gate_up[:, : shape.inner]) * gate_up[:, shape.inner :],
        },
    )


def _write(shape: ModelShape, tokens: int, device: torch.device) -> Case:
    heads = _random(device, tokens, 2 * shape.kv_heads, shape.head_dim)
    k, v = torch.split(heads, [shape.kv_heads, shape.kv_heads], dim=1)
    num_blocks = -(-tokens // BLOCK_SIZE)
    cache = _random(device, num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:tokens]
    return _case(
        roofline.kv_write(shape, tokens, BFLOAT16),
        f"{tokens} rows",
        {OURS: partial(kv_write.kv_write, k, v, PagedKV(cache[:, 0], cache[:, 1]), slots)},
    )


def _sample(shape: ModelShape, rows: int, device: torch.device) -> Case:
    logits = torch.randn(rows, shape.vocab, device=device) * 3

    def run() -> None:
        kept = logits.clone()
        sampling.filter_logits(kept, [50] * rows, [0.9] * rows, [0.0] * rows)
        sampling.draw(kept.softmax(-1), [0.5] * rows)

    return _case(roofline.sampling(shape, rows), f"{rows} rows", {OURS: run})


def _gather(shape: ModelShape, num_blocks: int, device: torch.device) -> Case:
    """Every other block of a cache into a buffer."""
    block_bytes = BLOCK_SIZE * shape.layers * int(roofline.kv_token_bytes(shape, BFLOAT16))
    blocks = torch.zeros(2 * num_blocks, block_bytes, dtype=torch.uint8, device=device)
    buffer = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    ids = list(range(0, 2 * num_blocks, 2))
    index = torch.tensor(ids, device=device)
    return _case(
        Work(name="gather_blocks", kind="copy", num_bytes=2.0 * buffer.numel(), flops=0.0),
        f"{num_blocks} x {block_bytes / 1024:.0f} KiB",
        {
            OURS: partial(block_copy.gather_blocks, blocks, ids, buffer),
            "torch, whole device": partial(torch.index_select, blocks, 0, index, out=buffer),
        },
    )


def _case(work: Work, size: str, implementations: Implementations) -> Case:
    return Case(name=f"{work.name} {size}", works=(work,), implementations=implementations)


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)
