"""kernels/decoder.py one op after the other. Each op chooses its own implementation, so GPUs run this too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.decoder import (
    Activation,
    AttentionStage,
    Decoder,
    Ends,
    ExpertsStage,
    MlpStage,
    MlpWeights,
    Stage,
    embed,
    project,
)
from kernels.decoder import run_stages as run_stages_op
from kernels.flat_batch import FlatBatch
from kernels.gates import gelu_mul, silu_mul
from kernels.kv_cache import PagedKV
from kernels.kv_write import kv_write
from kernels.linear import linear
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rope import rope

_GATES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_mul}


def prepared(
    decoder: Decoder, ends: Ends, batch: FlatBatch, caches: Sequence[PagedKV], logits: torch.Tensor
) -> Callable[[], None]:
    """What it returns fills logits [R, words of the head]."""
    return partial(forward, decoder, ends, batch, caches, logits)


def forward(decoder: Decoder, ends: Ends, batch: FlatBatch, caches: Sequence[PagedKV], logits: torch.Tensor) -> None:
    """Fills logits [R, words of the head]."""
    residual = embed(ends, batch.token_ids)
    nothing = torch.zeros_like(residual)
    delta, residual = run_stages_op(decoder, 0, len(decoder.stages), nothing, residual, batch, caches)
    logits.copy_(project(ends, delta[batch.sample_rows], residual[batch.sample_rows], decoder.eps))


def run_stages(
    decoder: Decoder,
    first: int,
    last: int,
    delta: torch.Tensor,
    residual: torch.Tensor,
    batch: FlatBatch,
    caches: Sequence[PagedKV],
    new_delta: torch.Tensor,
    new_residual: torch.Tensor,
) -> None:
    """Fills new_delta and new_residual, both [T, H]."""
    for index in range(first, last):
        stage = decoder.stages[index]
        normed, residual = enter(stage, delta, residual, decoder.eps)
        delta = _block(decoder, stage, normed, batch, caches[index // 2])
    new_delta.copy_(delta)
    new_residual.copy_(residual)


def enter(stage: Stage, delta: torch.Tensor, residual: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The stage's input and the residual stream with `delta` added, both [T, H]."""
    if stage.delta_norm is not None:
        delta = rms_norm(delta, stage.delta_norm, eps)
    return fused_add_rms_norm(delta, residual, stage.norm, eps)


def _block(decoder: Decoder, stage: Stage, x: torch.Tensor, batch: FlatBatch, kv: PagedKV) -> torch.Tensor:
    """x: [T, H]. Returns the delta, [T, H]."""
    match stage:
        case AttentionStage():
            return _attend(decoder, stage, x, batch, kv)
        case MlpStage():
            return _mlp(x, stage.weights, stage.activation)
        case ExpertsStage():
            return _experts(x, stage)


def _attend(decoder: Decoder, stage: AttentionStage, x: torch.Tensor, batch: FlatBatch, kv: PagedKV) -> torch.Tensor:
    split = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
    heads = linear(x, stage.qkv).view(x.shape[0], sum(split), decoder.head_dim)
    q, k, v = torch.split(heads, split, dim=1)
    q, k = _normed_heads(q, stage.query_norm, decoder.eps), _normed_heads(k, stage.key_norm, decoder.eps)
    q, k = rope(q, k, batch.positions, stage.cos, stage.sin)
    kv_write(k, v, kv, batch.slot_mapping)
    return linear(_paged(stage, q, batch, kv).flatten(1), stage.output)


def _normed_heads(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Each head [D] of [T, *, D] alone, where the family does that."""
    return heads if weight is None else rms_norm(heads.reshape(-1, heads.shape[-1]), weight, eps).view(heads.shape)


def _paged(stage: AttentionStage, q: torch.Tensor, batch: FlatBatch, kv: PagedKV) -> torch.Tensor:
    """q: [T, Hq, D], decode tokens first. Returns the same shape."""
    parts = []
    if batch.num_decodes:
        parts.append(
            paged_decode(
                q[: batch.num_decodes],
                kv,
                batch.decode_block_tables,
                batch.decode_context_lens,
                stage.scale,
                sliding_window=stage.window,
                soft_cap=stage.soft_cap,
            )
        )
    if batch.num_prefills:
        parts.append(
            paged_prefill(
                q[batch.num_decodes :],
                kv,
                batch.prefill_block_tables,
                batch.prefill_cu_seqlens,
                batch.prefill_context_lens,
                stage.scale,
                sliding_window=stage.window,
                soft_cap=stage.soft_cap,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mlp(x: torch.Tensor, weights: MlpWeights, activation: Activation) -> torch.Tensor:
    return linear(_GATES[activation](linear(x, weights.gate_up)), weights.down)


def _experts(x: torch.Tensor, stage: ExpertsStage) -> torch.Tensor:
    """A token's sum runs in the order of the experts, so that it does not depend on what else is in the batch."""
    weights, chosen = linear(x, stage.router).float().softmax(-1).topk(stage.num_active)
    if stage.normalised:
        weights /= weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for index in sorted(set(chosen.flatten().tolist())):
        rows, rank = (chosen == index).nonzero(as_tuple=True)
        delta = _mlp(x[rows], stage.experts[index], stage.activation)
        out.index_add_(0, rows, delta * weights[rows, rank, None].to(x.dtype))
    return out
