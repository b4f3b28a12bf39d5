"""How one block of KV lies in memory, in bytes. Never imports torch.

A block is its layers, one after the other, so that any range of layers is one piece to transfer. A layer is K and V,
[2, Hkv, block_size, D]; quantised, one byte an element, and behind it float32 scales, [2, Hkv, block_size], one for
each slot and head (kernels/kv_cache.py). Both parts are padded to whole cache lines there.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import ModelInfo

KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "int8": 1, "fp8": 1}  # int64: the fake engine's
QUANTISED_KV_DTYPES = ("int8", "fp8")
# setting -> kv_dtype, whatever the dtype is; bf16 and bfloat16 are one
CHOSEN_KV_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "int8": "int8", "fp8": "fp8"}
SCALE_BYTES = 4
LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Of one layer within a block: bytes from its start."""

    scales_offset: int  # where K and V end, when there are no scales
    num_bytes: int


def layer_format(model: ModelInfo, block_size: int) -> LayerFormat:
    num_rows = 2 * model.num_kv_heads * block_size
    payload_bytes = num_rows * model.head_dim * KV_DTYPE_BYTES[model.kv_dtype]
    if model.kv_dtype not in QUANTISED_KV_DTYPES:
        return LayerFormat(payload_bytes, payload_bytes)
    scales_offset = _whole_lines(payload_bytes)
    return LayerFormat(scales_offset, scales_offset + _whole_lines(num_rows * SCALE_BYTES))


def kv_block_bytes(model: ModelInfo, block_size: int) -> int:
    return model.num_layers * layer_format(model, block_size).num_bytes


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
