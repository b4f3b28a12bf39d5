"""A decoder: what a checkpoint and its family make of it, and the ops that compute some of its layers or a whole step.

A layer is two stages, attention and feed-forward. Each begins by adding to the residual stream what the stage before
has computed (its delta), so nothing is left to do between a stage's last linear and the next stage: tensor parallelism
sums the ranks' deltas there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from kernels.checks import check_dtype, check_rope_tables, check_rows, check_scoring, check_shape
from kernels.dispatch import Backend, implementation
from kernels.flat_batch import FlatBatch
from kernels.kv_cache import PagedKV
from kernels.linear import LinearWeights, linear
from kernels.rms_norm import fused_add_rms_norm, rms_norm

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated feed-forward block (Shazeer, 2020). Parts of `gate_up`: gate and up, or both as one."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stage:
    """delta_norm: [H] of the delta that comes in, where the family normalises that; norm: [H] of the stream."""

    delta_norm: torch.Tensor | None
    norm: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStage(_Stage):
    """Grouped-query attention over the paged cache of its layer.

    qkv: query, key and value heads. query_norm, key_norm: [D] of each head alone, or none. cos, sin: float32 [P, R/2].
    scale, window, soft_cap: as kernels/paged_prefill.py has them.
    """

    qkv: LinearWeights
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    output: LinearWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class MlpStage(_Stage):
    """One gated block."""

    weights: MlpWeights
    activation: Activation


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsStage(_Stage):
    """A mixture of gated blocks (Shazeer et al., 2017): each token goes through the few that the router prefers.

    router: one score an expert. normalised: a token's weights of its `num_active` experts add up to 1.
    """

    router: LinearWeights
    experts: tuple[MlpWeights, ...]
    num_active: int
    normalised: bool
    activation: Activation


Stage = AttentionStage | MlpStage | ExpertsStage


@dataclass(frozen=True, eq=False)
class Decoder:
    """Stages 2i and 2i + 1 are layer i's: attention, then feed-forward. Norms, biases and activations have one dtype.

    Used by one thread at a time: an implementation may keep memory for it.
    Raises ValueError or TypeError when the stages do not fit together.
    """

    stages: tuple[Stage, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    def __post_init__(self) -> None:
        if not self.stages or len(self.stages) % 2:
            raise ValueError(f"stages has {len(self.stages)} entries, expected two a layer")
        for index, stage in enumerate(self.stages):
            if isinstance(stage, AttentionStage) != (index % 2 == 0):
                raise ValueError(f"stages[{index}] is a {type(stage).__name__}, expected attention first of every two")
            self._check_stage(stage)

    @cached_property
    def hidden_size(self) -> int:
        return self.stages[0].norm.shape[0]

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.stages[0].norm.dtype

    def _check_stage(self, stage: Stage) -> None:
        self._check_norm("norm", stage.norm, self.hidden_size)
        self._check_norm("delta_norm", stage.delta_norm, self.hidden_size)
        match stage:
            case AttentionStage():
                self._check_attention(stage)
            case MlpStage():
                self._check_mlp(stage.weights)
            case ExpertsStage():
                self._check_linear("router", stage.router, self.hidden_size, len(stage.experts))
                for expert in stage.experts:
                    self._check_mlp(expert)

    def _check_attention(self, stage: AttentionStage) -> None:
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self._check_linear("qkv", stage.qkv, self.hidden_size, query + 2 * kv)
        self._check_linear("output", stage.output, query, self.hidden_size)
        self._check_norm("query_norm", stage.query_norm, self.head_dim)
        self._check_norm("key_norm", stage.key_norm, self.head_dim)
        check_rope_tables(stage.cos, stage.sin, self.head_dim)
        check_scoring(stage.window, stage.soft_cap)

    def _check_mlp(self, weights: MlpWeights) -> None:
        self._check_linear("gate_up", weights.gate_up, self.hidden_size, 2 * weights.down.columns)
        self._check_linear("down", weights.down, weights.down.columns, self.hidden_size)

    def _check_norm(self, name: str, weight: torch.Tensor | None, size: int) -> None:
        if weight is not None:
            check_shape(name, weight, (size,))
            check_dtype(name, weight, self.dtype)
            check_rows(name, weight)

    def _check_linear(self, name: str, weights: LinearWeights, columns: int, rows: int) -> None:
        if (weights.columns, weights.rows) != (columns, rows):
            raise ValueError(f"{name} is [{weights.rows}, {weights.columns}], expected [{rows}, {columns}]")
        if weights.bias is not None:
            check_dtype(f"{name}'s bias", weights.bias, self.dtype)


@dataclass(frozen=True, eq=False)
class Ends:
    """What stands before and behind a decoder's stages.

    embedding: [V, H], whose rows are multiplied by `embedding_scale` in the decoder's dtype. delta_norm: [H] of what
    the last stage adds, where the family normalises that; norm: [H] of the stream then; head: from H to the logits.
    Raises ValueError or TypeError for what does not fit together.
    """

    embedding: torch.Tensor
    embedding_scale: float
    delta_norm: torch.Tensor | None
    norm: torch.Tensor
    head: LinearWeights

    def __post_init__(self) -> None:
        (hidden,) = self.norm.shape
        check_shape("embedding", self.embedding, (None, hidden))
        check_rows("embedding", self.embedding)
        if self.delta_norm is not None:
            check_shape("delta_norm", self.delta_norm, (hidden,))
            check_dtype("delta_norm", self.delta_norm, self.norm.dtype)
        if self.head.columns != hidden:
            raise ValueError(f"head has {self.head.columns} columns, expected the norm's {hidden}")


def embed(ends: Ends, token_ids: torch.Tensor) -> torch.Tensor:
    """[T] -> [T, H], in the dtype of the norms. Raises IndexError (CPU only) for an id outside the embedding."""
    rows = torch.nn.functional.embedding(token_ids, ends.embedding).to(ends.norm.dtype)
    return rows if ends.embedding_scale == 1.0 else rows * ends.embedding_scale


def project(ends: Ends, delta: torch.Tensor, residual: torch.Tensor, eps: float) -> torch.Tensor:
    """[R, H] each, what the last stage adds and what it adds that to -> logits [R, words of the head]."""
    if ends.delta_norm is not None:
        delta = rms_norm(delta, ends.delta_norm, eps)
    normed, _ = fused_add_rms_norm(delta, residual, ends.norm, eps)
    return linear(normed, ends.head)


def forward(
    decoder: Decoder, ends: Ends, batch: FlatBatch, caches: Sequence[PagedKV], *, backend: Backend | None = None
) -> torch.Tensor:
    """A whole step: writes the tokens' KV and returns logits [R, words of the head], in the decoder's dtype.

    Gives what `embed`, `run_stages` and `project` give one after the other, to the bit. Raises as they do.
    """
    return prepared(decoder, ends, batch, caches, backend=backend)()


def prepared(
    decoder: Decoder, ends: Ends, batch: FlatBatch, caches: Sequence[PagedKV], *, backend: Backend | None = None
) -> Callable[[], torch.Tensor]:
    """`forward` of a batch in memory that is used again: each call computes what the batch's tensors then hold.

    The logits are the same tensor each time. Checked and described once: between two steps that have emptied the caches
    of the interpreter, that takes longer than calling. The number of threads is torch's of now.
    """
    check_shape("norm", ends.norm, (decoder.hidden_size,))
    check_dtype("norm", ends.norm, decoder.dtype)
    _check_caches(decoder, caches)
    if backend is None and ends.norm.is_cuda:
        backend = "reference"
    logits = ends.norm.new_empty((batch.sample_rows.shape[0], ends.head.rows))
    step = implementation("decoder", "prepared", ends.norm, backend)(decoder, ends, batch, caches, logits)

    def compute() -> torch.Tensor:
        step()
        return logits

    return compute


def run_stages(
    decoder: Decoder,
    first: int,
    last: int,
    delta: torch.Tensor,
    residual: torch.Tensor,
    batch: FlatBatch,
    caches: Sequence[PagedKV],
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes stages first .. last - 1 for one step's tokens and writes their KV. Returns new (delta, residual).

    delta, residual: [T, H], what is still to be added to the residual stream, and the stream before that. caches: one
    for each layer of the decoder. Gives what the ops give when called one by one (that is the reference; on GPUs it is
    the implementation too), to the bit.
    Raises ValueError or TypeError for shapes and dtypes; IndexError (CPU only) for a position, slot, context or block
    outside its table.
    """
    if not 0 <= first < last <= len(decoder.stages):
        raise ValueError(f"stages [{first}, {last}): expected at least one of the decoder's {len(decoder.stages)}")
    for name, tensor in (("residual", residual), ("delta", delta)):
        check_shape(name, tensor, (batch.token_ids.shape[0], decoder.hidden_size))
        check_dtype(name, tensor, decoder.dtype)
        check_rows(name, tensor)
    _check_caches(decoder, caches)
    if backend is None and residual.is_cuda:
        backend = "reference"
    run = implementation("decoder", "run_stages", residual, backend)
    new_delta, new_residual = torch.empty_like(residual), torch.empty_like(residual)
    run(decoder, first, last, delta, residual, batch, caches, new_delta, new_residual)
    return new_delta, new_residual


def _check_caches(decoder: Decoder, caches: Sequence[PagedKV]) -> None:
    if len(caches) * 2 != len(decoder.stages):
        raise ValueError(f"caches has {len(caches)} layers, expected the decoder's {len(decoder.stages) // 2}")
