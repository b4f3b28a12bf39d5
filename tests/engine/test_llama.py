"""Our Llama against transformers' on tiny random checkpoints: every variant that config.json can ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model_config import read_config
from engine.runner import flatten
from tests.engine.tiny_llama import (
    BLOCK_SIZE,
    OurModel,
    edit_config,
    make_checkpoint,
    random_ids,
    reference_greedy,
    reference_logits,
    scheduled,
)

TOLERANCE = 1e-4
BLOCKS = tuple(range(63, 31, -1))  # out of order on purpose
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn, own attention factor": {"rope_parameters": YARN | {"attention_factor": 0.7}},
    "yarn, mscale": {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.4}},
    "yarn, betas, not truncated": {
        "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        "head_dim": 32,
    },
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "eps": {"rms_norm_eps": 1e-2},
    "sharded": {"max_shard_size": "60KB"},
    "mistral": {"mistral": True},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, **VARIANTS[variant])
    ours = OurModel(tmp_path)
    prompt = random_ids(60)
    expected = reference_logits(reference, prompt)
    actual = ours.logits(scheduled(prompt, 0, BLOCKS))
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    assert greedy(ours, prompt, 20) == reference_greedy(reference, prompt, 20)


def test_sharded_variant_has_several_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **VARIANTS["sharded"])
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn"])
def test_the_old_spelling_of_rope_scaling_means_the_same(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **VARIANTS[name])
    new = read_config(tmp_path)
    rope = dict(VARIANTS[name]["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    edit_config(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope | {"type": kind})
    assert read_config(tmp_path) == new
    assert new.rope.type == name
    assert new.rope.theta == theta


@pytest.mark.parametrize(
    ("name", "length"), [("plain", 128), ("linear", 384), ("dynamic", 128), ("llama3", 128), ("yarn", 128)]
)
def test_max_model_len(name: str, length: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **VARIANTS[name])
    assert read_config(tmp_path).max_model_len == length


def test_chunks_and_decodes_in_one_batch_equal_each_alone(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path)
    ours = OurModel(tmp_path)
    first, second, third = random_ids(21, 1), random_ids(33, 2), random_ids(9, 3)
    tables = (0, 7, 3, 9, 11, 2), (20, 1, 22, 5, 24, 8, 26, 6, 28), (40, 41, 42)
    ours.logits(scheduled(first[:20], 0, tables[0]))
    ours.logits(scheduled(second[:13], 0, tables[1]))
    mixed = ours.logits(
        scheduled(first[20:], 20, tables[0]), scheduled(second[13:], 13, tables[1]), scheduled(third, 0, tables[2])
    )
    expected = [reference_logits(reference, ids)[n:] for ids, n in ((first, 20), (second, 13), (third, 0))]
    torch.testing.assert_close(mixed, torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_a_batch_that_samples_nothing_writes_kv(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    ours = OurModel(tmp_path)
    chunk = scheduled(random_ids(6), 0, (5, 6))._replace(sample=False)
    logits = ours.model.forward(flatten([chunk], BLOCK_SIZE), ours.kv)
    assert logits.shape == (0, 96)
    for cache in (part for layer in ours.kv for part in (layer.k, layer.v)):
        assert cache[5].abs().min() > 0
        assert cache[6, :, 2:].abs().max() == 0
        assert cache[:5].abs().max() == 0


def test_bfloat16_errs_no_more_than_transformers_in_bfloat16(tmp_path: Path) -> None:
    """Both round to 8 bits at every step, so their mean distances from float32 agree to within a quarter."""
    reference = make_checkpoint(tmp_path)
    prompt = random_ids(40)
    expected = reference_logits(reference, prompt)
    ours = OurModel(tmp_path, "bfloat16").logits(scheduled(prompt, 0, BLOCKS))
    theirs = reference_logits(reference.to(torch.bfloat16), prompt)
    assert 0 < (ours - expected).abs().mean() < 1.25 * (theirs - expected).abs().mean()


def greedy(ours: OurModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    start = 0
    while len(tokens) < len(prompt) + count:
        last = ours.logits(scheduled(tokens[start:], start, BLOCKS))[-1]
        start = len(tokens)
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :]
