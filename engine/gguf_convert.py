"""Turns a GGUF file into a Hugging Face directory with bfloat16 weights, or with its own blocks.

Weights are mapped, dequantised and written one tensor at a time, so a conversion needs little more memory than the
largest tensor. Only here does pdserve import transformers (for the tokenizer), and only while converting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.config_fields import CheckpointError
from engine.model_config import parse_config
from engine.quantization import BLOCKS_SUFFIX
from engine.safetensors_file import SINGLE_NAME, write_tensors

CONVERTER_VERSION = 1  # raise it when the same GGUF file would convert differently
ProgressCallback = Callable[[str, float], None]  # (stage, fraction done of that stage)

# llama.cpp's architectures (Mistral's files are Llama's), and the names that transformers has for them
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QWEN3_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
KEPT_BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # their bytes, for 32 weights
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later; a GGUF file holds only the table that these make
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def convert(source: Path, target: Path, progress: ProgressCallback, keep_blocks: bool = False) -> None:
    """Fills the empty directory `target`. Raises CheckpointError when `source` is no GGUF file of `ARCHITECTURES`.

    keep_blocks: linears in Q4_0, Q4_1 or Q8_0 stay so, instead of becoming bfloat16.
    """
    progress("reading GGUF", 0.0)
    model = _open(source)
    config = hf_config(model)
    if keep_blocks:
        config["quantization_config"] = {"quant_method": "gguf"}
    parse_config(config, source=str(source))  # before the long work
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _generation_config(model))
    _write_weights(model, config, target / SINGLE_NAME, lambda fraction: progress("converting weights", fraction))
    progress("building tokenizer", 0.0)
    _write_tokenizer(source, target, model)
    progress("building tokenizer", 1.0)


class GGUFModel:
    """Typed access to an open GGUF file's metadata and tensors."""

    def __init__(self, reader: gguf.GGUFReader, source: Path) -> None:
        self.source = source
        self.tensors = {t.name: t for t in reader.tensors}
        self._fields = reader.fields
        self.architecture = self.get("general.architecture", "")

    def get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def of_architecture(self, name: str, default: Any = None) -> Any:
        """A value under the architecture's own prefix; without `default` it must be there."""
        value = self.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.source}: {self.architecture}.{name} is missing from the GGUF file")
        return value

    def dequantized(self, name: str) -> NDArray[np.float32]:
        tensor = self.tensors[name]
        try:
            values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise CheckpointError(f"{self.source}: {name} is quantised as {kind}, which cannot be read") from None
        return values


def _open(source: Path) -> GGUFModel:
    try:
        model = GGUFModel(gguf.GGUFReader(source), source)
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{source} is not a whole GGUF file ({error}): copy it again") from None
    if model.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{source}: architecture {model.architecture!r}: GGUF files of {known} are supported")
    if model.of_architecture("expert_count", 0):
        raise CheckpointError(f"{source}: a mixture of experts: only dense models are supported")
    if (num_files := model.get("split.count", 1)) > 1:
        raise CheckpointError(f"{source}: one of {num_files} files: join them with llama-gguf-split --merge")
    if "token_embd.weight" not in model.tensors:
        raise CheckpointError(f"{source}: token_embd.weight is missing: only whole models are supported")
    return model


def hf_config(model: GGUFModel) -> dict[str, Any]:
    """config.json's content."""
    vocab_size, hidden_size = model.tensors["token_embd.weight"].shape[::-1].tolist()
    num_heads = model.of_architecture("attention.head_count")
    head_dim = model.of_architecture("attention.key_length", hidden_size // num_heads)
    if (rotated := model.of_architecture("rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError(f"{model.source}: {rotated} of {head_dim} dimensions rotate: only whole heads can")
    return {
        "architectures": [ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": model.of_architecture("feed_forward_length"),
        "num_hidden_layers": model.of_architecture("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.of_architecture("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest_float(model.of_architecture("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": model.of_architecture("context_length"),
        "rope_parameters": _rope_parameters(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
        "bos_token_id": model.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": model.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _shortest_float(value: float) -> float:
    """1e-5 for the float32 nearest to it: what the author wrote."""
    return float(str(np.float32(value)))


def _rope_parameters(model: GGUFModel) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_theta": model.of_architecture("rope.freq_base", 10_000.0)}
    if ROPE_FACTORS in model.tensors:
        return parameters | _llama3_parameters(model, parameters["rope_theta"])
    kind = model.of_architecture("rope.scaling.type", "none")
    if kind == "none":
        return parameters | {"rope_type": "default"}
    parameters |= {"rope_type": kind, "factor": model.of_architecture("rope.scaling.factor")}
    if kind == "yarn":
        trained = model.of_architecture("rope.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = trained
    return parameters


def _llama3_parameters(model: GGUFModel, theta: float) -> dict[str, Any]:
    """The parameters that make the file's table of frequency divisors. Raises CheckpointError when none do."""
    factors = model.dequantized(ROPE_FACTORS).astype(np.float64)
    parameters = LLAMA3_ROPE | {"rope_type": "llama3", "factor": float(factors.max())}
    if not np.allclose(llama3_divisors(parameters, theta, len(factors)), factors, rtol=1e-3):
        raise CheckpointError(f"{model.source}: {ROPE_FACTORS} is not the table of a Llama 3 model")
    return parameters


def llama3_divisors(parameters: dict[str, Any], theta: float, half_dim: int) -> NDArray[np.float64]:
    """By what Llama 3's scaling divides each rotary frequency: 1 for short waves, `factor` for long ones."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * theta ** (-np.arange(half_dim) / half_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / parameters["factor"] + smooth))


def _generation_config(model: GGUFModel) -> dict[str, Any]:
    ids = [model.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": model.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({i for i in ids if i is not None}),
        "pad_token_id": model.get("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(model: GGUFModel, config: dict[str, Any], file: Path, progress: Callable[[float], None]) -> None:
    names = [name for name in model.tensors if name != ROPE_FACTORS]
    tensors = [_Weight(model, config, name, hf_name(name, model)) for name in names]
    if "quantization_config" in config:
        tensors = [part for weight in tensors for part in _with_blocks(weight)]
    layout = {t.hf_name: t.layout for t in tensors}
    write_tensors(file, layout, ((t.hf_name, t.values()) for t in tensors), lambda done, total: progress(done / total))


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor to write: rounded to bfloat16, or the blocks as they are, uint8 [rows, blocks, bytes]."""

    model: GGUFModel
    config: dict[str, Any]
    name: str
    hf_name: str
    as_blocks: bool = False

    @property
    def layout(self) -> tuple[str, tuple[int, ...]]:
        shape = tuple(self.model.tensors[self.name].shape[::-1].tolist())
        return ("U8", (shape[0], shape[1] // 32, self._block_bytes)) if self.as_blocks else ("BF16", shape)

    def values(self) -> NDArray[Any]:
        if not self.as_blocks:
            return self._unpermuted(self.model.dequantized(self.name))
        rows: NDArray[np.uint8] = self.model.tensors[self.name].data
        return self._unpermuted(rows).reshape(self.layout[1])

    def _unpermuted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Moves rows: Llama's files interleave the rotary pairs of q and k (i, i+1), ours have halves (i, i + D/2)."""
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(self.name.split(".")[-2])
        if heads is None or self.model.architecture != "llama":
            return values
        num_heads = self.config[heads]
        pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(values.shape)

    @property
    def _block_bytes(self) -> int:
        return KEPT_BLOCKS[self.model.tensors[self.name].tensor_type.name]


def _with_blocks(weight: _Weight) -> list[_Weight]:
    """What is written when blocks are kept. In an embedding rows are looked up; a tied one is the head too."""
    if weight.model.tensors[weight.name].tensor_type.name not in KEPT_BLOCKS:
        return [weight]
    if weight.name != "token_embd.weight":
        return [replace(weight, hf_name=weight.hf_name.removesuffix(".weight") + BLOCKS_SUFFIX, as_blocks=True)]
    head = replace(weight, hf_name=f"lm_head{BLOCKS_SUFFIX}", as_blocks=True)
    return [weight, head] if weight.config["tie_word_embeddings"] else [weight]


def hf_name(name: str, model: GGUFModel) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises CheckpointError."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES and kind == "weight":
        return f"{TOP_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    names = LAYER_NAMES | QWEN3_NAMES if model.architecture == "qwen3" else LAYER_NAMES
    if block == "blk" and part in names and kind in ("weight", "bias"):
        return f"model.layers.{layer}.{names[part]}.{kind}"
    raise CheckpointError(f"{model.source}: unknown tensor {name}: no dense {model.architecture} model has it")


def _write_tokenizer(source: Path, target: Path, model: GGUFModel) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - with transformers below
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds and loads torch: only when converting

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    if model.get("tokenizer.ggml.pre") == "smollm":
        # transformers 5.24 does not know this split; without it runs of spaces before digits tokenise differently
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = model.of_architecture("context_length")
    tokenizer.save_pretrained(target)
    file = target / "tokenizer_config.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # how it was loaded, not what it is
        kept.pop(name, None)
    _write_json(file, kept)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
