"""The shape of a model, read from a Hugging Face directory's config.json and its family. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.config_fields import CheckpointError, Fields, read_json
from engine.families import FAMILIES, Family
from engine.quantization import StoredQuantization, parse_quantization
from engine.rope_config import RopeConfig, parse_local_rope, parse_rope

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as config.json has them


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of `count` feed-forward blocks, of which `num_active` compute each token. size: their inner width.

    normalised: a token's weights of its active experts add up to 1.
    """

    count: int
    num_active: int
    size: int
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ between the layers of one model. window: the tokens that one attends to, or all."""

    window: int | None = None
    rope: RopeConfig
    experts: ExpertsConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Checked sizes and switches of a model. Raises nothing itself: `read_config` does.

    quantization: of the checkpoint's own weights, or none. attention_scale: of query-key products. Soft caps bound
    scores and logits through tanh.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    activation: Activation
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]
    quantization: StoredQuantization | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have.

        Most linear and all YaRN files state the trained length and stretch it by `factor`. Dynamic and LongRoPE scaling
        would change the keys already cached once a sequence outgrows the trained length, so such a model is served up
        to that length. Other files state the stretched length.
        """
        match self.rope.type:
            case "linear" if not self.family.stretched_length:
                return int(self.max_position_embeddings * self.rope.factor)
            case "yarn":
                return int(self.rope.original_max_position_embeddings * self.rope.factor)
            case "longrope":
                return min(self.rope.original_max_position_embeddings, self.max_position_embeddings)
            case _:
                return self.max_position_embeddings


def read_config(model_dir: Path) -> ModelConfig:
    """Parses and checks `model_dir`'s config.json and generation_config.json. Raises CheckpointError."""
    file = model_dir / "config.json"
    config = parse_config(read_json(file), str(file))
    generation = model_dir / "generation_config.json"
    if not generation.is_file():
        return config
    more = _token_ids(read_json(generation), config.vocab_size, str(generation))
    return replace(config, eos_token_ids=config.eos_token_ids | more)


def parse_config(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """`values` is config.json's content; `source` names it in errors. Raises CheckpointError."""
    family = _family(values, source)
    values = {**family.defaults, **values}
    _refuse_unsupported(values, source)
    fields = Fields(values, source)
    counted = Fields({name: values.get(name) for name in family.reads}, source)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    vocab_size = fields.integer("vocab_size")
    max_position_embeddings = fields.integer("max_position_embeddings", 2048)  # before the rope, whose default it is
    rope = parse_rope(values, family, head_dim, source)
    attention_bias = counted.flag("attention_bias")
    config = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        layers=_layers(fields, family, rope, parse_local_rope(values, family, head_dim, source)),
        activation=_activation(fields, values, family),
        attention_scale=counted.number("query_pre_attn_scalar", head_dim) ** -0.5,
        attention_soft_cap=counted.optional_number("attn_logit_softcapping"),
        logit_soft_cap=counted.optional_number("final_logit_softcapping"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=counted.flag("mlp_bias"),
        eos_token_ids=_token_ids(values, vocab_size, source),
        quantization=parse_quantization(values.get("quantization_config"), source),
    )
    _check_shape(config, source)
    return config


def _token_ids(values: Mapping[str, Any], vocab_size: int, source: str) -> frozenset[int]:
    """`eos_token_id` is an int, a list of them or null. Raises CheckpointError."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise CheckpointError(f"{source}: eos_token_id = {value!r}: must be a token id, a list of them or null")
        if not 0 <= i < vocab_size:
            raise CheckpointError(f"{source}: eos_token_id = {i}: must be below vocab_size {vocab_size}")
    return frozenset(ids)


def _family(values: Mapping[str, Any], source: str) -> Family:
    names = values.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        found = ", ".join(map(str, names)) if isinstance(names, list) and names else "none"
        raise CheckpointError(f"{source}: architecture {found}: supported are {', '.join(FAMILIES)}")
    return FAMILIES[names[0]]


def _refuse_unsupported(values: Mapping[str, Any], source: str) -> None:
    if values.get("use_bidirectional_attention"):
        raise CheckpointError(f"{source}: use_bidirectional_attention is set: only causal attention is supported")


def _activation(fields: Fields, values: Mapping[str, Any], family: Family) -> Activation:
    name = values.get(family.activation_field, "silu")
    if name not in ACTIVATIONS:
        raise fields.error(family.activation_field, f"only {' and '.join(map(repr, ACTIVATIONS))} are supported")
    return ACTIVATIONS[name]


def _layers(fields: Fields, family: Family, rope: RopeConfig, local_rope: RopeConfig | None) -> tuple[LayerConfig, ...]:
    num_layers = fields.integer("num_hidden_layers")
    windows = _windows(fields, family, num_layers)
    experts = _experts(fields, family, num_layers)
    return tuple(
        LayerConfig(window=window, rope=local_rope if local_rope and window else rope, experts=mixture)
        for window, mixture in zip(windows, experts, strict=True)
    )


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """Of each layer."""
    interleaved = family.windows == "interleaved"
    window = fields.integer("sliding_window") if interleaved else fields.optional_integer("sliding_window")
    if family.windows == "none" and window is not None:
        raise fields.error("sliding_window", f"only full attention is supported for {family.title}")
    if window is None or ("use_sliding_window" in family.reads and not fields.flag("use_sliding_window")):
        return [None] * num_layers
    if family.windows == "all":
        return [window] * num_layers
    types = fields.items("layer_types") or _default_layer_types(fields, family, num_layers)
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise fields.error("layer_types", f"must be {num_layers} of 'sliding_attention' and 'full_attention'")
    return [window if kind == "sliding_attention" else None for kind in types]


def _default_layer_types(fields: Fields, family: Family, num_layers: int) -> list[str]:
    if family.windows == "late":
        first = fields.integer("max_window_layers", least=0)
        windowed = [i >= first for i in range(num_layers)]
    else:
        period = fields.integer("sliding_window_pattern")
        windowed = [(i + 1) % period > 0 for i in range(num_layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in windowed]


def _experts(fields: Fields, family: Family, num_layers: int) -> list[ExpertsConfig | None]:
    """Of each layer; None: an ordinary feed-forward block."""
    names = family.experts
    if names is None:
        return [None] * num_layers
    count_field = next(filter(fields.has, names.num_experts_fields), names.num_experts_fields[0])
    mixture = ExpertsConfig(
        count=fields.integer(count_field),
        num_active=fields.integer("num_experts_per_tok"),
        size=fields.integer(names.expert_size_field),
        normalised=fields.flag("norm_topk_prob") if names.normalised is None else names.normalised,
    )
    if mixture.num_active > mixture.count:
        raise fields.error("num_experts_per_tok", f"must be at most {count_field} = {mixture.count}")
    step, dense = fields.integer("decoder_sparse_step", 1), fields.items("mlp_only_layers")
    return [mixture if i not in dense and (i + 1) % step == 0 else None for i in range(num_layers)]


def _check_shape(config: ModelConfig, source: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads = {config.num_heads} is not a multiple of"
            f" num_key_value_heads = {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim = {config.head_dim}: must be even")
