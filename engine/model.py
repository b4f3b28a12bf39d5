"""A decoder-only transformer over a paged KV cache: a flat batch of tokens in, the logits of the rows to sample out.

One step computes prompts, chunks of prompts and single decode tokens of many sequences together. Their tokens lie one
after the other without padding; only attention knows where a sequence starts. What a model does differently from Llama,
engine/families.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.flat_batch import FlatBatch
from engine.layers import Attention, FeedForward, feed_forward
from engine.model_config import LayerConfig, ModelConfig, read_config
from engine.rotary import RotaryTable, rotary_table
from engine.tensor_parallel.exchange import ALONE, Exchange
from engine.weights import LayerWeights, ModelWeights, load_weights
from kernels.kv_cache import PagedKV
from kernels.linear import linear
from kernels.rms_norm import fused_add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: LayerWeights
    attention: Attention
    feed_forward: FeedForward


class Model:
    """The model of `config`; owns weights and rotary tables, borrows the KV cache.

    One of several ranks has a share of the weights and adds up what each block gives with the others.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, exchange: Exchange = ALONE) -> None:
        self._exchange = exchange
        self._vocab_size = config.vocab_size
        config = exchange.shard.local(config)
        self._eps = config.rms_norm_eps
        self._logit_soft_cap = config.logit_soft_cap
        self._weights = weights
        scale = config.hidden_size**0.5 if config.family.scaled_embedding else 1.0
        self._embedding_scale = torch.tensor(scale, dtype=weights.dtype)  # rounded, as it was in training
        tables = {
            rope: rotary_table(rope, config.head_dim, config.max_model_len) for rope in {x.rope for x in config.layers}
        }
        self._layers = tuple(
            _build(config, layer, part, tables[layer.rope])
            for layer, part in zip(config.layers, weights.layers, strict=True)
        )

    @classmethod
    def load(cls, model_dir: Path, dtype: str, exchange: Exchange = ALONE) -> Model:
        """Raises CheckpointError."""
        config = read_config(model_dir)
        return cls(config, load_weights(model_dir, config, dtype, exchange.shard), exchange)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: Sequence[PagedKV]) -> torch.Tensor:
        """Writes the tokens' KV into `kv`, one cache a layer; returns float32 logits [R, V].

        Of several ranks each passes the caches of its own heads, and the first one's logits are whole.
        """
        residual = self._embed(batch.token_ids)
        delta = torch.zeros_like(residual)
        for layer, cache in zip(self._layers, kv, strict=True):
            weights = layer.weights
            normed, residual = fused_add_rms_norm(delta, residual, weights.input_norm, self._eps)
            delta = self._exchange.summed(layer.attention(normed, batch, cache))
            delta = self._normed(delta, weights.attention_output_norm)
            normed, residual = fused_add_rms_norm(delta, residual, weights.mlp_input_norm, self._eps)
            delta = self._normed(self._exchange.summed(layer.feed_forward(normed)), weights.mlp_output_norm)
        rows = batch.sample_rows
        normed, _ = fused_add_rms_norm(delta[rows], residual[rows], self._weights.final_norm, self._eps)
        return self._logits(normed)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        rows = torch.nn.functional.embedding(token_ids, self._weights.embedding).to(self._weights.dtype)
        return rows * self._embedding_scale

    def _normed(self, delta: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """What is added to the residual stream, normalised where the family does that."""
        return delta if weight is None else rms_norm(delta, weight, self._eps)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] -> float32 [R, V]."""
        logits = self._exchange.joined(linear(x, self._weights.head), self._vocab_size).float()
        return logits if self._logit_soft_cap is None else (logits / self._logit_soft_cap).tanh() * self._logit_soft_cap


def _build(config: ModelConfig, layer: LayerConfig, weights: LayerWeights, rotary: RotaryTable) -> _Layer:
    return _Layer(weights, Attention(config, layer, weights, rotary), feed_forward(config, layer, weights.mlp))
