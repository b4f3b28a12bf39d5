"""GGUF files: converted once, to the same logits, and refused in one clear line."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize

from engine import checkpoint
from engine.checkpoint import (
    CheckpointError,
    cache_dir,
    model_info,
    resolve_model,
    weights_revision,
)
from engine.gguf_convert import LLAMA3_ROPE
from engine.model_config import read_config
from kernels.linear import LinearWeights
from tests.engine.gguf_files import BYTE_TOKENS, TEMPLATE, write_gguf
from tests.engine.quantized_checkpoints import load, values_of
from tests.engine.tiny_families import make_family
from tests.engine.tiny_llama import (
    OurModel,
    make_checkpoint,
    random_ids,
    reference_logits,
    scheduled,
)

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_models_logits(tied: bool, rope: str, user_cache: Path, tmp_path: Path) -> None:
    parameters = {"rope_type": rope, "rope_theta": 5e5} | ({"factor": 8.0} | LLAMA3_ROPE if rope == "llama3" else {})
    changes: dict[str, Any] = {"vocab_size": len(BYTE_TOKENS), "tie_word_embeddings": tied, "eos_token_id": 2}
    model = make_checkpoint(tmp_path / "hf", rope_parameters=parameters, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # what a conversion keeps
    write_gguf(tmp_path / "my-model.gguf", model)
    folder = resolve_model(str(tmp_path / "my-model.gguf"))
    assert folder.parent == cache_dir() == user_cache / "pdserve" / "models"
    prompt = random_ids(30, vocab_size=len(BYTE_TOKENS))
    actual = OurModel(folder).logits(scheduled(prompt, 0, range(8)))
    torch.testing.assert_close(actual, reference_logits(model, prompt), atol=1e-4, rtol=0)
    assert read_config(folder).eos_token_ids == {2}
    assert model_info(folder, "float32").model_id == "my-model"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 32}),
    ],
)
def test_a_gguf_file_of_another_family(name: str, heads: dict[str, int], user_cache: Path, tmp_path: Path) -> None:
    model = make_family(tmp_path / "hf", name, vocab_size=len(BYTE_TOKENS), eos_token_id=2, **heads)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # what a conversion keeps
    write_gguf(tmp_path / "m.gguf", model)
    prompt = random_ids(30, vocab_size=len(BYTE_TOKENS))
    actual = OurModel(resolve_model(str(tmp_path / "m.gguf"))).logits(scheduled(prompt, 0, range(8)))
    torch.testing.assert_close(actual, reference_logits(model, prompt), atol=1e-4, rtol=0)
    write_gguf(tmp_path / "blocks.gguf", model, quantized=Q8_0)
    weights = load(resolve_model(str(tmp_path / "blocks.gguf"), quantization="gguf"), "gguf")
    query = model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    torch.testing.assert_close(
        values_of(LinearWeights(weights.layers[1].qkv.parts[:1])),
        torch.from_numpy(dequantize(quantize(query, Q8_0), Q8_0)),
    )


def test_a_gguf_file_is_converted_once_and_again_when_its_content_changes(user_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2))
    stages: list[tuple[str, float]] = []
    first = resolve_model(str(file), lambda *stage: stages.append(stage))
    assert {stage for stage, _ in stages} == {"reading GGUF", "converting weights", "building tokenizer"}
    assert all(0 <= fraction <= 1 for _, fraction in stages)
    assert ("converting weights", 1.0) in stages
    before = len(stages)
    assert resolve_model(str(file), lambda *stage: stages.append(stage)) == first
    assert len(stages) == before
    changed = make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2, rms_norm_eps=1e-3)
    write_gguf(file, changed)
    second = resolve_model(str(file))
    assert second != first
    assert weights_revision(second) != weights_revision(first)


def test_a_gguf_file_with_another_byte_is_converted_again(user_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2))
    first = resolve_model(str(file))
    content = bytearray(file.read_bytes())
    content[-len(content) // 3] ^= 1
    file.write_bytes(content)
    assert resolve_model(str(file)) != first


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("model.safetensors", 1000), ("model.safetensors", 0), ("config.json", None), ("tokenizer.json", 30)],
)
def test_a_damaged_conversion_is_made_anew(name: str, num_bytes: int | None, user_cache: Path, tmp_path: Path) -> None:
    """Cut short, or lost."""
    file = tmp_path / "m.gguf"
    write_gguf(file, make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2))
    damaged = resolve_model(str(file)) / name
    whole = damaged.read_bytes()
    damaged.unlink()
    if num_bytes is not None:
        damaged.write_bytes(whole[:num_bytes])
    assert resolve_model(str(file)) == damaged.parent
    assert damaged.read_bytes() == whole


def test_a_conversion_that_fails_leaves_nothing_behind(
    user_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_source: Path, target: Path, _progress: object, _keep_blocks: bool) -> None:
        (target / "config.json").write_text("{}")
        raise CheckpointError("no")

    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoint, "convert", fail)
    with pytest.raises(CheckpointError, match="no"):
        resolve_model(str(file))
    assert [p.suffix for p in cache_dir().iterdir()] == [".lock"]


def test_a_second_process_waits_for_the_first_ones_conversion(
    user_cache: Path, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes: the lock belongs to the open file, not to the process."""
    started, may_finish, conversions = threading.Event(), threading.Event(), []

    def convert(source: Path, target: Path, _progress: object, _keep_blocks: bool) -> None:
        conversions.append(source)
        started.set()
        assert may_finish.wait(30)
        shutil.copytree(tiny_dir, target, dirs_exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (target / name).write_text('{"version": "1.0"}')

    def second_reports(stage: str, _fraction: float) -> None:
        assert stage == "waiting for another process's conversion"
        may_finish.set()

    monkeypatch.setattr(checkpoint, "convert", convert)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(resolve_model, str(file))
        assert started.wait(30)
        second = threads.submit(resolve_model, str(file), second_reports)
        assert first.result(30) == second.result(30)
    assert conversions == [file]
    assert {p.name for p in cache_dir().iterdir()} == {first.result().name, f".{first.result().name}.lock"}


def test_a_llama3_table_that_no_parameters_make_is_refused(user_cache: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0} | LLAMA3_ROPE | {"low_freq_factor": 2.0}
    model = make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2, rope_parameters=rope)
    write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not the table of a Llama 3 model"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_a_gguf_file_cut_short_is_refused(user_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2))
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a whole GGUF file .*: copy it again"):
        resolve_model(str(file))


def test_other_gguf_architectures_are_refused(tmp_path: Path, user_cache: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'gemma3': GGUF files of llama, qwen2, qwen3 are supported"):
        resolve_model(str(tmp_path / "m.gguf"))


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "split": ({"split.count": 3}, [], "m.gguf: one of 3 files: join them with llama-gguf-split --merge"),
    "rope": (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        [],
        "m.gguf: rope_type = 'longrope': supported are default, linear",
    ),
    "scale": ({}, ["blk.0.attn_q.scale"], "m.gguf: unknown tensor blk.0.attn_q.scale: no dense llama model has it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gguf_file_cannot_mean_here_is_refused_before_it_is_converted(
    case: str, user_cache: Path, tmp_path: Path
) -> None:
    metadata, tensors, message = REFUSED[case]
    model = make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2)
    write_gguf(tmp_path / "m.gguf", model, extra_tensors=tensors, **metadata)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(tmp_path / "m.gguf"))
    assert [p.suffix for p in cache_dir().iterdir()] == [".lock"]
