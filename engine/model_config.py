"""The shape of a Llama-family model, read from a Hugging Face directory's config.json. No torch here.

Both spellings of the rotary settings are read: `rope_theta` + `rope_scaling`, and the `rope_parameters` of newer files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class CheckpointError(Exception):
    """A model cannot be used; one line says what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary settings. Fields that `type` does not use keep their defaults."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: whole dimensions bound the ramp


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Checked sizes and switches of a model. Raises nothing itself: `read_config` does."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have.

        Linear and YaRN files state the trained length and stretch it by `factor`. Dynamic scaling would change the keys
        already cached once a sequence outgrows the trained length, so such a model is served up to that length, where
        the scaling does nothing. A llama3 file states the stretched length.
        """
        match self.rope.type:
            case "linear":
                return int(self.max_position_embeddings * self.rope.factor)
            case "yarn":
                return int(self.rope.original_max_position_embeddings * self.rope.factor)
            case _:
                return self.max_position_embeddings


def read_config(model_dir: Path) -> LlamaConfig:
    """Parses and checks `model_dir`'s config.json and generation_config.json. Raises CheckpointError."""
    values = read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    eos = _token_ids(values.get("eos_token_id"))
    if generation.is_file():
        eos |= _token_ids(read_json(generation).get("eos_token_id"))
    return parse_config(values, eos, str(model_dir / "config.json"))


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises CheckpointError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: give a Hugging Face model directory or a GGUF file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return values


def parse_config(values: Mapping[str, Any], eos_token_ids: frozenset[int], source: str = "config.json") -> LlamaConfig:
    """`values` is config.json's content; `source` names it in errors. Raises CheckpointError."""
    _check_architecture(values, source)
    fields = _Fields(values, source)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    config = LlamaConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rope=_parse_rope(values, source),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        eos_token_ids=eos_token_ids,
    )
    _check_shape(config, source)
    return config


class _Fields:
    """Typed access to a JSON object; null counts as absent, as in the files that transformers writes."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._source}: {name} = {value!r}: must be a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._source}: {name} = {value!r}: must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._source}: {name} = {value!r}: must be true or false")
        return value

    def _get(self, name: str, default: float | None) -> object:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._source}: {name} is missing")
        return value


def _token_ids(value: object) -> frozenset[int]:
    """`eos_token_id` is an int, a list of them or null."""
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool))


def _check_architecture(values: Mapping[str, Any], source: str) -> None:
    names = values.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED_ARCHITECTURES:
        found = ", ".join(map(str, names)) if isinstance(names, list) and names else "none"
        raise CheckpointError(f"{source}: architecture {found}: supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    if (act := values.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{source}: hidden_act = {act!r}: only 'silu' is supported")
    if values.get("sliding_window") is not None:
        raise CheckpointError(
            f"{source}: sliding_window = {values['sliding_window']}: only full attention is supported"
        )
    if values.get("quantization_config") is not None:
        raise CheckpointError(f"{source}: quantization_config is set: only unquantised weights are supported")


def _check_shape(config: LlamaConfig, source: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads = {config.num_heads} is not a multiple of"
            f" num_key_value_heads = {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim = {config.head_dim}: must be even")
    if bad := [i for i in config.eos_token_ids if not 0 <= i < config.vocab_size]:
        raise CheckpointError(f"{source}: eos_token_id = {bad[0]}: must be below vocab_size {config.vocab_size}")


def _parse_rope(values: Mapping[str, Any], source: str) -> RopeConfig:
    rope = _rope_values(values, source)
    fields = _Fields(rope, source)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{source}: rope_type = {kind!r}: supported are {', '.join(ROPE_TYPES)}")
    if (part := fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{source}: partial_rotary_factor = {part}: only whole heads can be rotated")
    factor = fields.number("factor", 1.0 if kind == "default" else None)
    return RopeConfig(
        type=kind,
        theta=fields.number("rope_theta", 10_000.0),
        factor=factor,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", 2048),
        low_freq_factor=fields.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=fields.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(fields, rope, factor) if kind == "yarn" else 1.0,
        truncate=fields.flag("truncate", True),
    )


def _rope_values(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The rotary object of either spelling, completed from the top level, in transformers' order of precedence."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{source}: rope_parameters = {rope!r}: must be an object")
    trained = values.get("original_max_position_embeddings")
    return {
        "rope_theta": values.get("rope_theta"),
        "partial_rotary_factor": values.get("partial_rotary_factor"),
        "original_max_position_embeddings": values.get("max_position_embeddings"),
        **rope,
        **({} if trained is None else {"original_max_position_embeddings": trained}),
    }


def _yarn_attention_factor(fields: _Fields, rope: Mapping[str, Any], factor: float) -> float:
    """The temperature of YaRN (Peng et al. 2023, section 3.4), with DeepSeek's mscale pair where a file gives it."""
    if rope.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _mscale(factor, fields.number("mscale")) / _mscale(factor, fields.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
