"""A decoder-only transformer over a paged KV cache: a flat batch of tokens in, the logits of the rows to sample out.

One step computes prompts, chunks of prompts and single decode tokens of many sequences together. Their tokens lie one
after the other without padding; only attention knows where a sequence starts. What a model does differently from Llama,
engine/families.py says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.device import CPU, moved
from engine.layers import decoder_of
from engine.model_config import ModelConfig, read_config
from engine.shard import WHOLE
from engine.tensor_parallel.exchange import ALONE, Exchange
from engine.weights import ModelWeights, load_weights
from kernels.decoder import ExpertsStage, run_stages
from kernels.flat_batch import FlatBatch
from kernels.kv_cache import PagedKV
from kernels.linear import linear
from kernels.rms_norm import fused_add_rms_norm, rms_norm


class Model:
    """The model of `config`; owns weights and rotary tables, borrows the KV cache.

    One of several ranks has a share of the weights and adds up what each block gives with the others.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, exchange: Exchange = ALONE) -> None:
        self._exchange = exchange
        self._vocab_size = config.vocab_size
        self.kv_heads = exchange.shard.heads(config.num_heads, config.num_kv_heads).kv
        config = exchange.shard.local(config)
        self._eps = config.rms_norm_eps
        self._logit_soft_cap = config.logit_soft_cap
        self._weights = weights
        scale = config.hidden_size**0.5 if config.family.scaled_embedding else 1.0
        device = weights.embedding.device
        # rounded, as it was in training
        self._embedding_scale = torch.tensor(scale, dtype=weights.dtype, device=device)
        self._decoder = moved(decoder_of(config, weights), device)  # its rotary tables were made on the host
        num_stages = len(self._decoder.stages)
        at_once = num_stages if exchange.shard == WHOLE else 1  # what needs no sum over the ranks in between
        self._runs = [(first, first + at_once) for first in range(0, num_stages, at_once)]

    @classmethod
    def load(
        cls,
        model_dir: Path,
        dtype: str,
        exchange: Exchange = ALONE,
        device: torch.device = CPU,
        quantization: str = "none",
    ) -> Model:
        """The weights on `device`. Raises CheckpointError."""
        config = read_config(model_dir)
        weights = load_weights(model_dir, config, dtype, exchange.shard, quantization)
        return cls(config, moved(weights, device), exchange)

    @property
    def capturable(self) -> bool:
        """Whether a step's work depends on shapes alone: experts are chosen, and ranks' sums made, on the host."""
        experts = any(isinstance(stage, ExpertsStage) for stage in self._decoder.stages)
        return self._exchange.shard == WHOLE and not experts

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: Sequence[PagedKV]) -> torch.Tensor:
        """Writes the tokens' KV into `kv`, one cache a layer; returns float32 logits [R, V].

        Of several ranks each passes the caches of its own heads, and the first one's logits are whole.
        """
        self._exchange.announce(batch)
        residual = self._embed(batch.token_ids)
        delta = torch.zeros_like(residual)
        for first, last in self._runs:
            delta, residual = run_stages(self._decoder, first, last, delta, residual, batch, kv)
            delta = self._exchange.summed(delta)
        return self._logits(delta[batch.sample_rows], residual[batch.sample_rows])

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        rows = torch.nn.functional.embedding(token_ids, self._weights.embedding).to(self._weights.dtype)
        return rows * self._embedding_scale

    def _logits(self, delta: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[R, H] each, what the last layer adds and what it adds that to -> float32 [R, V]."""
        delta_norm = self._weights.layers[-1].mlp_output_norm
        if delta_norm is not None:
            delta = rms_norm(delta, delta_norm, self._eps)
        normed, _ = fused_add_rms_norm(delta, residual, self._weights.final_norm, self._eps)
        logits = self._exchange.joined(linear(normed, self._weights.head), self._vocab_size).float()
        return logits if self._logit_soft_cap is None else (logits / self._logit_soft_cap).tanh() * self._logit_soft_cap
