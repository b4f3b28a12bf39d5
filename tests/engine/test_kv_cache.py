"""One memory, seen by blocks and by layers: nothing overlaps, and a block's bytes are all there is of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import BlockCopy, ModelInfo
from engine.fake import FAKE_MODEL
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes

SMOLLM2 = replace(FAKE_MODEL, num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32", kv_dtype="float32")
ODD = replace(SMOLLM2, num_layers=2, num_kv_heads=1, head_dim=20)
every_kv_dtype = pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])


def parts_of(cache_layer: object) -> list[torch.Tensor]:
    parts = [getattr(cache_layer, name) for name in ("k", "v", "k_scales", "v_scales")]
    return [part for part in parts if part is not None]


def test_bytes_a_token() -> None:
    """A row of 64 elements takes 256 bytes in float32, and 64 with a scale of 4 quantised."""
    num_rows = 30 * 2 * 3
    of = {dtype: kv_block_bytes(replace(SMOLLM2, kv_dtype=dtype), 16) / 16 for dtype in ("float32", "bfloat16", "int8")}
    assert of == {"float32": num_rows * 256, "bfloat16": num_rows * 128, "int8": num_rows * 68}
    assert kv_block_bytes(replace(SMOLLM2, kv_dtype="fp8"), 16) / 16 == of["int8"]


@every_kv_dtype
@pytest.mark.parametrize(("model", "block_size"), [(SMOLLM2, 16), (ODD, 16), (ODD, 1), (ODD, 7)])
def test_parts_lie_side_by_side_in_their_block(model: ModelInfo, block_size: int, kv_dtype: str) -> None:
    model = replace(model, kv_dtype=kv_dtype)
    memory = np.zeros(3 * kv_block_bytes(model, block_size), np.uint8)
    cache = kv_cache(memory, model, block_size)
    parts = [part for layer in cache.layers for part in parts_of(layer)]
    for number, part in enumerate(parts, start=1):
        of_block = part[1].view(torch.uint8)
        assert not of_block.any(), "a part overlaps an earlier one"
        of_block.fill_(number % 255 + 1)
    assert not cache.blocks[0].any()
    assert not cache.blocks[2].any()
    assert int((cache.blocks[1] > 0).sum()) == sum(part[1].numel() * part.element_size() for part in parts)
    if kv_dtype in ("float32", "bfloat16"):
        assert bool(cache.blocks[1].all())


@every_kv_dtype
def test_a_copied_block_has_the_scales(kv_dtype: str) -> None:
    model = replace(ODD, kv_dtype=kv_dtype)
    cache = kv_cache(np.zeros(4 * kv_block_bytes(model, 4), np.uint8), model, 4)
    parts = [part for layer in cache.layers for part in parts_of(layer)]
    for part in parts:
        part[1] = torch.arange(1, 1 + part[1].numel()).reshape(part[1].shape).float().to(part.dtype)
    cache.copy_blocks([BlockCopy(1, 3)])
    for part in parts:
        assert torch.equal(part[3].float(), part[1].float())
        assert part[3].float().abs().max() > 0
