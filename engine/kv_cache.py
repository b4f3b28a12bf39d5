"""The model's KV cache over a pod's KV memory: by blocks, which are copied and transferred, and by layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import BlockCopy, ModelInfo
from engine.kv_format import QUANTISED_KV_DTYPES, SCALE_BYTES, kv_block_bytes, layer_format
from engine.weights import TORCH_DTYPES
from kernels.block_copy import copy_blocks
from kernels.kv_cache import PagedKV

_TORCH_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Two views of one memory. blocks: uint8 [N, block_bytes]; layers: what each layer's ops take."""

    blocks: torch.Tensor
    layers: tuple[PagedKV, ...]

    def of_heads(self, heads: range) -> tuple[PagedKV, ...]:
        """What each layer's ops take of a rank that has these KV heads."""
        return tuple(layer.of_heads(heads) for layer in self.layers)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        copy_blocks(self.blocks, [c.source for c in copies], [c.target for c in copies])


def kv_cache(kv_memory: NDArray[np.uint8] | torch.Tensor, model: ModelInfo, block_size: int) -> KVCache:
    """The cache over `kv_memory`, as engine/kv_format.py lays it out. Raises ValueError unless it is whole blocks."""
    block_bytes = kv_block_bytes(model, block_size)
    memory = torch.as_tensor(kv_memory)
    if memory.numel() == 0 or memory.numel() % block_bytes:
        raise ValueError(f"kv_memory has {memory.numel()} bytes: must be a multiple of a block's {block_bytes}")
    blocks = memory.view(-1, block_bytes)
    by_layer = blocks.view(len(blocks), model.num_layers, -1).unbind(1)
    return KVCache(blocks, tuple(_layer(each, model, block_size) for each in by_layer))


def _layer(memory: torch.Tensor, model: ModelInfo, block_size: int) -> PagedKV:
    """memory: uint8 [N, layer's bytes], one layer of every block."""
    slots = (2, model.num_kv_heads, block_size)
    offset = layer_format(model, block_size).scales_offset
    num_elements = math.prod(slots) * model.head_dim
    dtype = _TORCH_DTYPES[model.kv_dtype]
    k, v = memory[:, : num_elements * dtype.itemsize].view(dtype).view(-1, *slots, model.head_dim).unbind(1)
    if model.kv_dtype not in QUANTISED_KV_DTYPES:
        return PagedKV(k, v)
    scales = memory[:, offset : offset + math.prod(slots) * SCALE_BYTES].view(torch.float32).view(-1, *slots)
    return PagedKV(k, v, *scales.unbind(1))
