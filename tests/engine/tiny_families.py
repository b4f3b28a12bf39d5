"""A tiny random checkpoint of every family, made by transformers: a recipe for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WINDOW = 11
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "eos_token_id": 299,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Recipe:
    """architecture: its class in transformers is <architecture>ForCausalLM, its configuration's `config`."""

    architecture: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
_EXPERTS = {"num_experts_per_tok": 2, "sliding_window": WINDOW}
RECIPES: dict[str, Recipe] = {
    "llama 2": Recipe("Llama", "LlamaConfig", {"num_key_value_heads": 4}),
    "llama 3": Recipe(
        "Llama",
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            }
        },
    ),
    "mistral": Recipe("Mistral", "MistralConfig", {"sliding_window": WINDOW}),
    "mistral without window": Recipe("Mistral", "MistralConfig", {"sliding_window": None}),
    "qwen2": Recipe("Qwen2", "Qwen2Config"),
    "qwen2 with late windows": Recipe(
        "Qwen2", "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Recipe("Qwen3", "Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3 with biases": Recipe("Qwen3", "Qwen3Config", {"attention_bias": True, "head_dim": 32}),
    "gemma 2": Recipe(
        "Gemma2", "Gemma2Config", _GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    ),
    "gemma 2 without caps": Recipe(
        "Gemma2", "Gemma2Config", _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma 3": Recipe(
        "Gemma3",
        "Gemma3TextConfig",
        _GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi-3": Recipe("Phi3", "Phi3Config", {"sliding_window": WINDOW}),
    "phi-3 longrope": Recipe(
        "Phi3",
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [4.0] * 8,
            },
        },
    ),
    "phi-3 partly rotated": Recipe(
        "Phi3",
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [4.0] * 6,
            },
        },
    ),
    "mixtral": Recipe("Mixtral", "MixtralConfig", _EXPERTS | {"num_local_experts": 4}),
    "qwen3-moe": Recipe(
        "Qwen3Moe",
        "Qwen3MoeConfig",
        _EXPERTS
        | {
            "num_experts": 5,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "use_sliding_window": True,
        },
    ),
    "qwen3-moe, not normalised": Recipe(
        "Qwen3Moe",
        "Qwen3MoeConfig",
        _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
}


def make_family(folder: Path, name: str, **changes: Any) -> Any:
    """Writes the checkpoint `name` to `folder`, in several shards; returns transformers' model of it in float32."""
    import transformers

    recipe = RECIPES[name]
    config = getattr(transformers, recipe.config)(**TINY | recipe.changes | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{recipe.architecture}ForCausalLM")._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    centre = 0.0 if "Gemma" in recipe.architecture else 1.0  # Gemma's norms multiply by 1 + weight
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(mean=centre if "norm" in parameter_name else 0.0, std=0.15)
    model.save_pretrained(folder, max_shard_size="80KB")
    return model.eval()
