"""What tells one family of models from another: all of them are the decoder of engine/model.py.

A family states what its config.json does not: which parts exist, what they are called in the file, which optional
fields of config.json count, and what an absent field means. No code depends on a family's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# Which layers look back no further than config.json's sliding_window:
# "none": none, and a window is refused. "all": every layer. "late": those from max_window_layers on, if
# use_sliding_window is set. "interleaved": all but every sliding_window_pattern-th. With the last two, layer_types
# comes first where a file has it.
Windows = Literal["none", "all", "late", "interleaved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """A mixture of experts: its names below a layer's prefix, and the fields of config.json with its sizes."""

    block: str
    gate: str
    up: str
    down: str
    num_experts_fields: tuple[str, ...]  # the first that a file has
    expert_size_field: str
    normalised: bool | None = None  # whether a token's expert weights add up to 1; None: norm_topk_prob


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The defaults are Llama's.

    reads: optional fields of config.json that count; the others are ignored, as in transformers.
    defaults: what absent fields of config.json mean (null is present).
    """

    title: str
    windows: Windows = "none"
    reads: frozenset[str] = frozenset()
    defaults: Mapping[str, object] = field(default_factory=dict)
    activation_field: str = "hidden_act"
    qkv_bias: bool = False  # always; attention_bias and mlp_bias are fields that may be read
    fused_projections: bool = False  # the file has qkv_proj and gate_up_proj
    qk_norm: bool = False  # RMSNorm of each query and key head
    sandwich_norms: bool = False  # RMSNorm also after attention and after feed-forward
    norm_weight_offset: float = 0.0  # the file's norm weights are this much too small
    scaled_embedding: bool = False  # times sqrt(hidden_size)
    local_rope: bool = False  # layers with a window have rotary angles of their own
    stretched_length: bool = False  # max_position_embeddings counts what rope scaling adds already
    partial_rope: bool = False  # partial_rotary_factor is read: a part of each head is rotated
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    experts: ExpertNames | None = None


_WINDOW_SWITCH = frozenset({"use_sliding_window"})
_QWEN_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_3 = Family(
    title="Qwen3",
    windows="late",
    qk_norm=True,
    reads=_WINDOW_SWITCH | {"attention_bias"},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
)
_GEMMA_2 = Family(
    title="Gemma 2",
    windows="interleaved",
    activation_field="hidden_activation",
    sandwich_norms=True,
    norm_weight_offset=1.0,
    scaled_embedding=True,
    reads=frozenset({"attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}),
    defaults={
        "eos_token_id": 1,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)

_MISTRAL_DEFAULTS: Mapping[str, object] = {
    "eos_token_id": 2,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        title="Llama", reads=frozenset({"attention_bias", "mlp_bias"}), defaults={"eos_token_id": 2}
    ),
    "MistralForCausalLM": Family(
        title="Mistral", windows="all", defaults={**_MISTRAL_DEFAULTS, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(
        title="Qwen2",
        windows="late",
        qkv_bias=True,
        reads=_WINDOW_SWITCH,
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen3ForCausalLM": _QWEN_3,
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": replace(
        _GEMMA_2,
        title="Gemma 3",
        qk_norm=True,
        local_rope=True,
        stretched_length=True,
        reads=_GEMMA_2.reads - {"attn_logit_softcapping"},
        defaults={
            **_GEMMA_2.defaults,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131_072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
    ),
    "Phi3ForCausalLM": Family(
        title="Phi-3",
        windows="all",
        fused_projections=True,
        partial_rope=True,
        rope_types=("default", "longrope"),
        defaults={
            "eos_token_id": 32_000,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "MixtralForCausalLM": Family(
        title="Mixtral",
        windows="all",
        defaults={
            **_MISTRAL_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        experts=ExpertNames(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            num_experts_fields=("num_local_experts",),
            expert_size_field="intermediate_size",
            normalised=True,
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        title="Qwen3-MoE",
        windows="all",
        qk_norm=True,
        reads=_WINDOW_SWITCH | {"attention_bias"},
        defaults={
            **_QWEN_DEFAULTS,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        experts=ExpertNames(
            block="mlp",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
            num_experts_fields=("num_experts", "num_local_experts"),
            expert_size_field="moe_intermediate_size",
        ),
    ),
}
