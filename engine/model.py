"""The Llama architecture over a paged KV cache: a flat batch of tokens in, the logits of the rows to sample out.

One step computes prompts, chunks of prompts and single decode tokens of many sequences together. Their tokens lie one
after the other without padding; only attention knows where a sequence starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.model_config import LlamaConfig, read_config
from engine.rotary import RotaryTable, rotary_table
from engine.weights import LayerWeights, LlamaWeights, load_weights
from kernels.kv_write import kv_write
from kernels.linear import linear
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import fused_add_rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T tokens: first one each of B decode sequences, then the runs of S prefill sequences.

    token_ids, positions, slot_mapping: int64 [T]; a slot is block * block_size + offset.
    sample_rows: int64 [R], the tokens whose logits are wanted.
    Decode: block_tables int32 [B, M], context_lens int32 [B]. Prefill: the same with S, and cu_seqlens int32 [S + 1],
    which count from the first prefill token. Context lengths include the tokens of this step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_rows: torch.Tensor
    decode_block_tables: torch.Tensor
    decode_context_lens: torch.Tensor
    prefill_block_tables: torch.Tensor
    prefill_context_lens: torch.Tensor
    prefill_cu_seqlens: torch.Tensor

    @property
    def num_decodes(self) -> int:
        return self.decode_context_lens.shape[0]

    @property
    def num_prefills(self) -> int:
        return self.prefill_context_lens.shape[0]


class Llama:
    """The model of `config`; owns weights and rotary table, borrows the KV cache."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, rotary: RotaryTable) -> None:
        self._config = config
        self._weights = weights
        self._rotary = rotary
        self._scale = config.head_dim**-0.5

    @classmethod
    def load(cls, model_dir: Path, dtype: str) -> Llama:
        """Raises CheckpointError."""
        config = read_config(model_dir)
        return cls(config, load_weights(model_dir, config, dtype), rotary_table(config))

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: torch.Tensor) -> torch.Tensor:
        """Writes the tokens' KV into kv [N, L, 2, Hkv, block_size, D]; returns float32 logits [R, V]."""
        eps = self._config.rms_norm_eps
        residual = torch.nn.functional.embedding(batch.token_ids, self._weights.embedding).to(self._weights.dtype)
        delta = torch.zeros_like(residual)
        for index, layer in enumerate(self._weights.layers):
            normed, residual = fused_add_rms_norm(delta, residual, layer.input_norm, eps)
            delta = self._attention(layer, normed, batch, kv[:, index, 0], kv[:, index, 1])
            normed, residual = fused_add_rms_norm(delta, residual, layer.post_attention_norm, eps)
            delta = linear(silu_mul(linear(normed, layer.gate_up)), layer.down)
        rows = batch.sample_rows
        normed, _ = fused_add_rms_norm(delta[rows], residual[rows], self._weights.final_norm, eps)
        return linear(normed, self._weights.head).float()

    def _attention(
        self, layer: LayerWeights, x: torch.Tensor, batch: FlatBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """x: [T, H]; k_cache, v_cache: [N, Hkv, block_size, D]. Returns [T, H]."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = linear(x, layer.qkv).view(x.shape[0], num_heads + 2 * num_kv_heads, self._config.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = rope(q, k, batch.positions, self._rotary.cos, self._rotary.sin)
        kv_write(k, v, k_cache, v_cache, batch.slot_mapping)
        return linear(self._paged(q, batch, k_cache, v_cache).flatten(1), layer.output)

    def _paged(self, q: torch.Tensor, batch: FlatBatch, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """q: [T, Hq, D], decode tokens first. Returns the same shape."""
        parts = []
        if batch.num_decodes:
            parts.append(
                paged_decode(
                    q[: batch.num_decodes],
                    k_cache,
                    v_cache,
                    batch.decode_block_tables,
                    batch.decode_context_lens,
                    self._scale,
                )
            )
        if batch.num_prefills:
            parts.append(
                paged_prefill(
                    q[batch.num_decodes :],
                    k_cache,
                    v_cache,
                    batch.prefill_block_tables,
                    batch.prefill_cu_seqlens,
                    batch.prefill_context_lens,
                    self._scale,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
