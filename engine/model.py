"""A decoder-only transformer over a paged KV cache: a flat batch of tokens in, the logits of the rows to sample out.

One step computes prompts, chunks of prompts and single decode tokens of many sequences together. Their tokens lie one
after the other without padding; only attention knows where a sequence starts. What a model does differently from Llama,
engine/families.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from engine.device import CPU, moved
from engine.layers import decoder_of, ends_of
from engine.model_config import ModelConfig, read_config
from engine.shard import WHOLE
from engine.tensor_parallel.exchange import ALONE, Exchange
from engine.weights import TORCH_DTYPES, ModelWeights, load_weights
from kernels.decoder import Decoder, ExpertsStage, embed, prepared, project, run_stages
from kernels.flat_batch import FlatBatch
from kernels.kv_cache import PagedKV
from kernels.linear import prefers_panels


class Model:
    """The model of `config`; owns weights and rotary tables, borrows the KV cache.

    One of several ranks has a share of the weights and adds up what each block gives with the others.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, exchange: Exchange = ALONE) -> None:
        self._exchange = exchange
        self._vocab_size = config.vocab_size
        self.kv_heads = exchange.shard.heads(config.num_heads, config.num_kv_heads).kv
        config = exchange.shard.local(config)
        self._logit_soft_cap = config.logit_soft_cap
        self._ends = ends_of(config, weights)
        # its rotary tables were made on the host
        self._decoder: Decoder = moved(decoder_of(config, weights), weights.embedding.device)

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
        in_panels = prefers_panels(device, TORCH_DTYPES[dtype])
        weights = load_weights(model_dir, config, dtype, exchange.shard, quantization, in_panels)
        return cls(config, moved(weights, device), exchange)

    @property
    def capturable(self) -> bool:
        """Whether a step's work depends on shapes alone: experts are chosen, and ranks' sums made, on the host."""
        experts = any(isinstance(stage, ExpertsStage) for stage in self._decoder.stages)
        return self._exchange.shard == WHOLE and not experts

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: Sequence[PagedKV]) -> torch.Tensor:
        """Writes the tokens' KV into `kv`, one cache a layer; returns logits [R, V], float32 or what it computes in.

        Of several ranks each passes the caches of its own heads, and the first one's logits are whole.
        """
        return self.prepared(batch, kv)()

    def prepared(self, batch: FlatBatch, kv: Sequence[PagedKV]) -> Callable[[], torch.Tensor]:
        """`forward` of a batch in memory that is used again: each call computes what the batch's tensors then hold.

        Logits are valid until the next call.
        """
        if self._exchange.shard == WHOLE:
            step = prepared(self._decoder, self._ends, batch, kv)
        else:
            step = partial(self._forward_in_parts, batch, kv)
        cap = self._logit_soft_cap
        return step if cap is None else lambda: (step().float() / cap).tanh() * cap

    def _forward_in_parts(self, batch: FlatBatch, kv: Sequence[PagedKV]) -> torch.Tensor:
        """[R, V] on the first rank: stage by stage, with a sum over the ranks behind each."""
        self._exchange.announce(batch)
        residual = embed(self._ends, batch.token_ids)
        delta = torch.zeros_like(residual)
        for stage in range(len(self._decoder.stages)):
            delta, residual = run_stages(self._decoder, stage, stage + 1, delta, residual, batch, kv)
            delta = self._exchange.summed(delta)
        rows = batch.sample_rows
        words = project(self._ends, delta[rows], residual[rows], self._decoder.eps)
        return self._exchange.joined(words, self._vocab_size)
