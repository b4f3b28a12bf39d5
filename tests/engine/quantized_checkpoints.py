"""Tiny checkpoints in the layouts of AutoAWQ and GPTQ, packed here word by word, and the float model that they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.model_config import read_config
from engine.shard import WHOLE, Shard
from engine.weights import ModelWeights, load_weights
from kernels.linear import LinearWeights, Part
from kernels.panels import PanelMatrix, unpacked
from kernels.quantized import QuantizedMatrix, dequantized
from tests.engine.tiny_llama import make_checkpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SHAPES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


def load(folder: Path, quantization: str = "none", shard: Shard = WHOLE) -> ModelWeights:
    return load_weights(folder, read_config(folder), "float32", shard, quantization)


def values_of(weights: LinearWeights) -> torch.Tensor:
    return torch.cat([_plain(part) for part in weights.parts])


def _plain(part: Part) -> torch.Tensor:
    if isinstance(part, QuantizedMatrix):
        return dequantized(part)
    return (unpacked(part) if isinstance(part, PanelMatrix) else part).float()


@dataclass(frozen=True)
class Recipe:
    """symmetric: every zero point is the middle. group: -1 for whole rows. act_order: groups of random columns."""

    method: str
    bits: int = 4
    group: int = 64
    symmetric: bool = False
    layout: str = "gptq"
    act_order: bool = False

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.symmetric,
            "desc_act": self.act_order,
            "checkpoint_format": self.layout,
        }


def make_quantized(folder: Path, recipe: Recipe) -> Any:
    """Writes a checkpoint whose linears are random integers; returns transformers' model of their values."""
    model = make_checkpoint(folder, **SHAPES)
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    generator = np.random.default_rng(0)
    for name in [n for n in tensors if "_proj.weight" in n]:
        rows, columns = tensors.pop(name).shape
        linear = random_linear(rows, columns, recipe, generator)
        state[name].copy_(linear.values)
        tensors |= {f"{name.removesuffix('.weight')}.{kind}": t for kind, t in linear.stored(recipe).items()}
    save_file(
        {n: t.half() if t.dtype == torch.float32 else t for n, t in tensors.items()}, folder / "model.safetensors"
    )
    for name, tensor in tensors.items():  # float16 is all that the file holds of the rest
        if name in state:
            state[name].copy_(tensor.half().float())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": recipe.config}))
    return model


@dataclass(frozen=True)
class Linear:
    """levels: [N, K]; zeros, scales: [N, G]; groups: [K], of each column; values: float32 [N, K]."""

    levels: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray
    values: torch.Tensor

    def stored(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        scales = torch.from_numpy(self.scales.T.copy()).half()
        if recipe.method == "awq":
            words = {"qweight": packed(reordered(self.levels.T), 4), "qzeros": packed(reordered(self.zeros.T), 4)}
        else:
            lacking = sum(1 << shift for shift in range(0, 32, recipe.bits)) if recipe.layout == "gptq" else 0
            words = {
                "qweight": packed(self.levels, recipe.bits).T.contiguous(),
                "qzeros": packed(self.zeros.T, recipe.bits) - lacking,  # a 0 borrows from its neighbour
                "g_idx": torch.from_numpy(self.groups.astype(np.int32)),
            }
        return words | {"scales": scales}


def random_linear(rows: int, columns: int, recipe: Recipe, generator: np.random.Generator) -> Linear:
    middle, group = 2 ** (recipe.bits - 1), columns if recipe.group == -1 else recipe.group
    num_groups = columns // group
    levels = generator.integers(0, 2 * middle, (rows, columns))
    zeros = np.full((rows, num_groups), middle)
    if not recipe.symmetric:
        zeros = generator.integers(0, 2 * middle, (rows, num_groups))
    scales = (generator.random((rows, num_groups)) * 0.3 / middle + 0.1 / middle).astype(np.float16)
    groups = np.arange(columns) // group
    if recipe.act_order:
        groups = generator.permutation(groups)
    spread = scales.astype(np.float32)[:, groups] * (levels - zeros[:, groups])
    return Linear(levels, zeros, scales, groups, torch.from_numpy(spread).float())


def reordered(values: np.ndarray) -> np.ndarray:
    """AWQ's order of the eight values of a word, along the last dimension."""
    return values.reshape(*values.shape[:-1], -1, 8)[..., list(AWQ_ORDER)].reshape(values.shape)


def packed(values: np.ndarray, bits: int) -> torch.Tensor:
    """int32 words along the last dimension, the first value in the lowest bits."""
    parts = values.reshape(*values.shape[:-1], -1, 32 // bits).astype(np.uint32)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for i in range(32 // bits):
        words |= (parts[..., i] & (2**bits - 1)) << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy())
