"""The model's KV cache over a pod's KV memory: by blocks, which are copied and transferred, and by layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import BlockCopy, ModelInfo
from engine.weights import TORCH_DTYPES
from kernels.block_copy import copy_blocks
from kernels.kv_cache import PagedKV


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


def kv_cache(kv_memory: NDArray[np.uint8], model: ModelInfo, block_size: int) -> KVCache:
    """[N, L, 2, Hkv, block_size, D] over `kv_memory`. Raises ValueError unless it is a whole number of blocks."""
    block_shape = (model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
    dtype = TORCH_DTYPES[model.dtype]
    block_bytes = int(np.prod(block_shape, dtype=np.int64)) * dtype.itemsize
    if kv_memory.size == 0 or kv_memory.size % block_bytes:
        raise ValueError(f"kv_memory has {kv_memory.size} bytes: must be a multiple of a block's {block_bytes}")
    blocks = torch.from_numpy(kv_memory).view(-1, block_bytes)
    kv = blocks.view(dtype).view(-1, *block_shape)
    return KVCache(blocks, tuple(PagedKV(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(model.num_layers)))
