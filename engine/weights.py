"""Weights of a Llama from mapped safetensors files, fused for fewer and larger matrix products.

Where the file's dtype is the wanted one, tensors that are used as they are stay views of the mapped file: pods on one
host share them and the system may drop them under pressure. Only the fused ones are copied, each from a mapping of its
own that ends with the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from engine.model_config import CheckpointError, LlamaConfig
from engine.safetensors_file import TensorEntry, read_header, shard_files

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Linear:
    """weight: [out, in]; bias: [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Rows of `qkv`: all query heads, then key, then value heads. Rows of `gate_up`: gate, then up."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """embedding: [V, H]; with tied embeddings `head` is the same memory."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


def load_weights(model_dir: Path, config: LlamaConfig, dtype: str) -> LlamaWeights:
    """Raises CheckpointError when a tensor is missing or its shape is not what config.json says."""
    reader = _Reader(model_dir, TORCH_DTYPES[dtype])
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = reader.tensor("model.embed_tokens.weight", (vocab, hidden))
    tied = config.tie_word_embeddings
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_load_layer(reader, f"model.layers.{i}", config) for i in range(config.num_layers)),
        final_norm=reader.tensor("model.norm.weight", (hidden,)),
        head=Linear(embedding if tied else reader.tensor("lm_head.weight", (vocab, hidden)), None),
    )


def _load_layer(reader: _Reader, prefix: str, config: LlamaConfig) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    projections = {f"{attention}.q_proj": query_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
    return LayerWeights(
        input_norm=reader.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=reader.linear(projections, hidden, config.attention_bias),
        output=reader.linear({f"{attention}.o_proj": hidden}, query_rows, config.attention_bias),
        post_attention_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, config.mlp_bias),
        down=reader.linear({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


class _Reader:
    """Finds tensors by name in a checkpoint's shards and gives them in one dtype."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._found: dict[str, tuple[Path, TensorEntry]] = {
            name: (shard, entry) for shard in shard_files(model_dir) for name, entry in read_header(shard).items()
        }

    def linear(self, rows: dict[str, int], columns: int, bias: bool) -> Linear:
        """One layer from the projections `rows` (name without suffix -> output rows), stacked in order."""
        weight = self._stacked({f"{name}.weight": (n, columns) for name, n in rows.items()})
        return Linear(weight, self._stacked({f"{name}.bias": (n,) for name, n in rows.items()}) if bias else None)

    def _stacked(self, shapes: dict[str, tuple[int, ...]]) -> torch.Tensor:
        parts = [self.tensor(name, shape) for name, shape in shapes.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the mapped file when it has our dtype, else a converted copy."""
        if name not in self._found:
            raise CheckpointError(f"{self._model_dir}: weight {name} is missing, though config.json calls for it")
        shard, entry = self._found[name]
        if entry.shape != shape:
            raise CheckpointError(f"{shard}: {name} has shape {entry.shape}, config.json calls for {shape}")
        if entry.dtype not in FILE_DTYPES:
            raise CheckpointError(f"{shard}: {name} is {entry.dtype}: weights must be {', '.join(FILE_DTYPES)}")
        with safe_open(shard, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor.to(self._dtype)
