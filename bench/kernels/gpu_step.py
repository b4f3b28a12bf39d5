"""Whole engine steps of a model with random weights: decode steps by graphs and without, prefills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.kernels import roofline
from bench.kernels.gpu_cases import BLOCK_SIZE, DTYPE, OURS, Case
from bench.kernels.model_shapes import ModelShape
from bench.kernels.roofline import BFLOAT16, Step
from engine.batch import ModelInfo
from engine.decode_graphs import Capture, DecodeGraphs
from engine.device import uploaded
from engine.kv_cache import KVCache, kv_cache
from engine.model import Model
from engine.model_config import parse_config
from engine.weights import LayerWeights, ModelWeights
from kernels.decoder import MlpWeights
from kernels.flat_batch import FlatBatch
from kernels.linear import LinearWeights

EAGER = "without graphs"


def step_cases(shape: ModelShape, steps: tuple[Step, ...], device: torch.device, capture: Capture) -> Iterator[Case]:
    """One model and one cache for all steps, as large as the largest needs."""
    model = random_model(shape, device)
    longest = max(step.context for step in steps)
    num_blocks = max(step.sequences * -(-step.context // BLOCK_SIZE) for step in steps)
    cache = _cache(shape, num_blocks, longest, device)
    for step in steps:
        if step.new == 1:
            yield _decode_case(shape, model, cache, step, capture)
        else:
            yield _prefill_case(shape, model, cache, step)


def _decode_case(shape: ModelShape, model: Model, cache: KVCache, step: Step, capture: Capture) -> Case:
    device = cache.blocks.device
    batch = flat_batch(shape, step)
    width = batch.decode_block_tables.shape[1]

    def forward(inputs: FlatBatch) -> torch.Tensor:
        return model.forward(inputs, cache.layers)

    graphs = DecodeGraphs(forward, capture, max_rows=step.sequences, table_width=width, device=device)
    return _case(
        shape,
        step,
        {OURS: partial(graphs.forward, batch), EAGER: lambda: forward(uploaded(batch, device))},
    )


def _prefill_case(shape: ModelShape, model: Model, cache: KVCache, step: Step) -> Case:
    batch = flat_batch(shape, step)
    return _case(shape, step, {OURS: lambda: model.forward(uploaded(batch, cache.blocks.device), cache.layers)})


def _case(shape: ModelShape, step: Step, implementations: dict[str, Callable[[], object]]) -> Case:
    """Without sampling, whose time depends on what requests ask for."""
    works = tuple(work for work in roofline.step_kernels(shape, step, BFLOAT16) if work.kind != "sampling")
    return Case(name=f"step of {shape.name} {step.name}", works=works, implementations=implementations)


def flat_batch(shape: ModelShape, step: Step) -> FlatBatch:
    """On the host. Sequence i has the i-th run of blocks; the logits of each one's last token are wanted."""
    width = -(-step.context // BLOCK_SIZE)
    tables = torch.arange(step.sequences * width, dtype=torch.int32).view(step.sequences, width)
    lengths = torch.full((step.sequences,), step.context, dtype=torch.int32)
    positions = torch.arange(step.context - step.new, step.context)
    slots = tables.long()[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    decode = step.new == 1
    return FlatBatch(
        token_ids=torch.arange(step.tokens) % shape.vocab,
        positions=positions.repeat(step.sequences),
        slot_mapping=slots.flatten(),
        sample_rows=torch.arange(step.sequences) * step.new + step.new - 1,
        decode_block_tables=tables if decode else tables[:0],
        decode_context_lens=lengths if decode else lengths[:0],
        prefill_block_tables=tables[:0] if decode else tables,
        prefill_context_lens=lengths[:0] if decode else lengths,
        prefill_cu_seqlens=torch.arange(1 if decode else step.sequences + 1, dtype=torch.int32) * step.new,
    )


def random_model(shape: ModelShape, device: torch.device) -> Model:
    """A Llama of `shape` in bfloat16, made on the device."""
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.query_heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": shape.tied,
        }
    )
    embedding = _matrix(device, shape.vocab, shape.hidden)
    weights = ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(shape, device) for _ in range(shape.layers)),
        final_norm=torch.ones(shape.hidden, dtype=DTYPE, device=device),
        head=LinearWeights((embedding if shape.tied else _matrix(device, shape.vocab, shape.hidden),)),
        dtype=DTYPE,
    )
    return Model(config, weights)


def _layer(shape: ModelShape, device: torch.device) -> LayerWeights:
    qkv, output, gate_up, down = (
        LinearWeights((_matrix(device, rows, columns),)) for _, rows, columns in shape.linears
    )
    norm = torch.ones(shape.hidden, dtype=DTYPE, device=device)
    return LayerWeights(
        input_norm=norm,
        qkv=qkv,
        query_norm=None,
        key_norm=None,
        output=output,
        attention_output_norm=None,
        mlp_input_norm=norm,
        mlp=MlpWeights(gate_up=gate_up, down=down),
        mlp_output_norm=None,
    )


def _matrix(device: torch.device, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=DTYPE, device=device).mul_(columns**-0.5)


def _cache(shape: ModelShape, num_blocks: int, max_model_len: int, device: torch.device) -> KVCache:
    info = ModelInfo(
        model_id=shape.name,
        weights_revision="random",
        vocab_size=shape.vocab,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    block_bytes = BLOCK_SIZE * int(np.prod([shape.layers, 2, shape.kv_heads, shape.head_dim])) * DTYPE.itemsize
    return kv_cache(torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device), info, BLOCK_SIZE)
