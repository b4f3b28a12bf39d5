"""The two halves of a decoder layer, with everything that families and layers may vary resolved when it was loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.flat_batch import FlatBatch
from engine.model_config import Activation, ExpertsConfig, LayerConfig, ModelConfig
from engine.rotary import RotaryTable
from engine.weights import ExpertWeights, LayerWeights, MlpWeights
from kernels.gelu_mul import gelu_mul
from kernels.kv_cache import PagedKV
from kernels.kv_write import kv_write
from kernels.linear import LinearWeights, linear
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul

FeedForward = Callable[[torch.Tensor], torch.Tensor]  # [T, H] -> [T, H]
_GATES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_mul, "gelu_tanh": gelu_mul}


class Attention:
    """Grouped-query attention over the paged cache of one layer."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, rotary: RotaryTable) -> None:
        self._weights = weights
        self._rotary = rotary
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._scale = config.attention_scale
        self._window = layer.window
        self._soft_cap = config.attention_soft_cap

    def __call__(self, x: torch.Tensor, batch: FlatBatch, kv: PagedKV) -> torch.Tensor:
        """x: [T, H]; kv: this layer's cache. Returns [T, H]."""
        heads = linear(x, self._weights.qkv).view(x.shape[0], sum(self._heads), self._head_dim)
        q, k, v = torch.split(heads, self._heads, dim=1)
        q, k = self._normed(q, self._weights.query_norm), self._normed(k, self._weights.key_norm)
        q, k = rope(q, k, batch.positions, self._rotary.cos, self._rotary.sin)
        kv_write(k, v, kv, batch.slot_mapping)
        return linear(self._paged(q, batch, kv).flatten(1), self._weights.output)

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Each head [D] of [T, *, D] alone, where the family does that."""
        if weight is None:
            return heads
        return rms_norm(heads.reshape(-1, self._head_dim), weight, self._eps).view(heads.shape)

    def _paged(self, q: torch.Tensor, batch: FlatBatch, kv: PagedKV) -> torch.Tensor:
        """q: [T, Hq, D], decode tokens first. Returns the same shape."""
        parts = []
        if batch.num_decodes:
            parts.append(
                paged_decode(
                    q[: batch.num_decodes],
                    kv,
                    batch.decode_block_tables,
                    batch.decode_context_lens,
                    self._scale,
                    sliding_window=self._window,
                    soft_cap=self._soft_cap,
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
                    self._scale,
                    sliding_window=self._window,
                    soft_cap=self._soft_cap,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated feed-forward block (Shazeer, 2020)."""

    weights: MlpWeights
    gate: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.gate(linear(x, self.weights.gate_up)), self.weights.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts (Shazeer et al., 2017): each token goes through the few blocks that the router prefers.

    A token's sum runs in the order of the experts, so that it does not depend on what else is in the batch.
    """

    config: ExpertsConfig
    router: LinearWeights
    experts: tuple[Mlp, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = linear(x, self.router).float().softmax(-1).topk(self.config.num_active)
        if self.config.normalised:
            weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, self.experts[index](x[rows]) * weights[rows, rank, None].to(x.dtype))
        return out


def feed_forward(config: ModelConfig, layer: LayerConfig, weights: MlpWeights | ExpertWeights) -> FeedForward:
    """The block that `layer` has."""
    gate = _GATES[config.activation]
    if isinstance(weights, MlpWeights):
        return Mlp(weights, gate)
    if layer.experts is None:
        raise ValueError("weights of experts for a layer without")
    return Experts(layer.experts, weights.router, tuple(Mlp(expert, gate) for expert in weights.experts))
