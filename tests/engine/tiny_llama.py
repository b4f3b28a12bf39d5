"""Tiny random checkpoints made by transformers, and the means to run ours beside its model on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch import ScheduledSequence
from engine.checkpoint import model_info
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.runner import flatten
from engine.sequence import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 95,
    "bos_token_id": 1,
}


def make_checkpoint(folder: Path, *, max_shard_size: str = "1GB", mistral: bool = False, **changes: Any) -> Any:
    """Writes a random checkpoint to `folder` and returns transformers' model of it in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    if mistral:
        model = MistralForCausalLM(MistralConfig(**TINY | {"sliding_window": None} | changes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**TINY | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.15)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Rewrites config.json; a change to None removes the key."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def random_ids(count: int, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return ids


def scheduled(
    token_ids: Sequence[int], start: int, block_table: Sequence[int], params: SamplingParams = GREEDY
) -> ScheduledSequence:
    """A run of a prompt's tokens, or a single one behind it, after which a token is drawn."""
    prompt_ids = (0,) * (start + len(token_ids)) if len(token_ids) > 1 else ()
    return ScheduledSequence("s", tuple(token_ids), start, tuple(block_table), True, params, prompt_ids, ())


class OurModel:
    """Our model with a KV cache of its own."""

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        num_blocks: int = 64,
        kv_dtype: str = "auto",
        quantization: str = "none",
    ) -> None:
        self.model = Model.load(folder, dtype, quantization=quantization)
        info = model_info(folder, dtype, kv_dtype=kv_dtype)
        memory = np.zeros(num_blocks * kv_block_bytes(info, BLOCK_SIZE), np.uint8)
        cache = kv_cache(memory, info, BLOCK_SIZE)
        self.blocks, self.kv = cache.blocks, cache.layers

    def logits(self, *sequences: ScheduledSequence) -> torch.Tensor:
        """float32 [T, V] of every token of a batch; tokens behind a prompt come first."""
        flat = flatten(sequences, BLOCK_SIZE)
        return self.model.forward(replace(flat, sample_rows=torch.arange(len(flat.token_ids))), self.kv)


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 [T, V] by transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def reference_greedy(model: Any, token_ids: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens by transformers' generate, end-of-text ids ignored."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = out[0, len(token_ids) :].tolist()
    return tokens
