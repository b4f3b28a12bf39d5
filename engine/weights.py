"""Weights of a Llama as views of mapped safetensors files: pods on one host share the memory, and it is read once.

Matrices stay bfloat16 where the file has them so, also in a float32 model: products widen them exactly as they read
them, for half of the memory and of its traffic. Only what the file has in another dtype is a converted copy, and the
vectors, which are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.model_config import CheckpointError, LlamaConfig
from engine.safetensors_file import TensorEntry, read_header, shard_files
from kernels.linear import LinearWeights

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_DTYPES = ("F32", "F16", "BF16")
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parts of `qkv`: query, key and value heads. Parts of `gate_up`: gate and up."""

    input_norm: torch.Tensor
    qkv: LinearWeights
    output: LinearWeights
    post_attention_norm: torch.Tensor
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """embedding: [V, H]; with tied embeddings `head` is the same memory. dtype: that of everything between them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: LinearWeights
    dtype: torch.dtype


def load_weights(model_dir: Path, config: LlamaConfig, dtype: str) -> LlamaWeights:
    """Raises CheckpointError when a tensor is missing or its shape is not what config.json says."""
    reader = _Reader(model_dir, TORCH_DTYPES[dtype])
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = reader.matrix("model.embed_tokens.weight", (vocab, hidden))
    tied = config.tie_word_embeddings
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_load_layer(reader, f"model.layers.{i}", config) for i in range(config.num_layers)),
        final_norm=reader.vector("model.norm.weight", hidden),
        head=LinearWeights((embedding if tied else reader.matrix("lm_head.weight", (vocab, hidden)),)),
        dtype=TORCH_DTYPES[dtype],
    )


def _load_layer(reader: _Reader, prefix: str, config: LlamaConfig) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    projections = {f"{attention}.q_proj": query_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
    return LayerWeights(
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(projections, hidden, config.attention_bias),
        output=reader.linear({f"{attention}.o_proj": hidden}, query_rows, config.attention_bias),
        post_attention_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, config.mlp_bias),
        down=reader.linear({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


class _Reader:
    """Finds tensors by name in a checkpoint's shards, each of which it maps once."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._opened: dict[Path, Any] = {}
        self._found: dict[str, tuple[Path, TensorEntry]] = {
            name: (shard, entry) for shard in shard_files(model_dir) for name, entry in read_header(shard).items()
        }

    def linear(self, rows: dict[str, int], columns: int, bias: bool) -> LinearWeights:
        """One layer from the projections `rows` (name without suffix -> output rows), in order."""
        parts = [self.matrix(f"{name}.weight", (n, columns)) for name, n in rows.items()]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.to(self._dtype) for part in parts]
        biases = [self.vector(f"{name}.bias", n) for name, n in rows.items()] if bias else []
        return LinearWeights(tuple(parts), torch.cat(biases) if biases else None)

    def matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A view of the mapped file when it has our dtype or bfloat16, else a converted copy."""
        tensor = self._tensor(name, shape)
        tensor = tensor if tensor.dtype == torch.bfloat16 else tensor.to(self._dtype)
        _fetch_pages(tensor)
        return tensor

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._tensor(name, (size,)).to(self._dtype)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the mapped file."""
        if name not in self._found:
            raise CheckpointError(f"{self._model_dir}: weight {name} is missing, though config.json calls for it")
        shard, entry = self._found[name]
        if entry.shape != shape:
            raise CheckpointError(f"{shard}: {name} has shape {entry.shape}, config.json calls for {shape}")
        if entry.dtype not in FILE_DTYPES:
            raise CheckpointError(f"{shard}: {name} is {entry.dtype}: weights must be {', '.join(FILE_DTYPES)}")
        if shard not in self._opened:
            self._opened[shard] = safe_open(shard, framework="pt")
        tensor: torch.Tensor = self._opened[shard].get_tensor(name)
        return tensor


def _fetch_pages(tensor: torch.Tensor) -> None:
    """Reads one byte of each page, so that loading waits for the disk rather than the first request."""
    tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()
