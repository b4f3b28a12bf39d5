"""A model's layers as kernels/decoder.py computes them, from its configuration and its weights."""

from __future__ import annotations

import torch

from engine.model_config import LayerConfig, ModelConfig
from engine.rotary import RotaryTable, rotary_table
from engine.weights import LayerWeights, ModelWeights
from kernels.decoder import AttentionStage, Decoder, Ends, ExpertsStage, MlpStage, MlpWeights, Stage


def decoder_of(config: ModelConfig, weights: ModelWeights) -> Decoder:
    """All layers; those of one rank of several from its own configuration and weights."""
    tables = {rope: rotary_table(rope, config.max_model_len) for rope in {x.rope for x in config.layers}}
    stages: list[Stage] = []
    delta_norm = None
    for layer, part in zip(config.layers, weights.layers, strict=True):
        stages += [_attention(config, layer, part, tables[layer.rope], delta_norm), _feed_forward(config, layer, part)]
        delta_norm = part.mlp_output_norm
    return Decoder(tuple(stages), config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)


def ends_of(config: ModelConfig, weights: ModelWeights) -> Ends:
    """What stands before and behind all layers; of one rank of several with the words of its own."""
    scale = config.hidden_size**0.5 if config.family.scaled_embedding else 1.0
    return Ends(
        embedding=weights.embedding,
        embedding_scale=torch.tensor(scale, dtype=weights.dtype).item(),  # rounded, as it was in training
        delta_norm=weights.layers[-1].mlp_output_norm,
        norm=weights.final_norm,
        head=weights.head,
    )


def _attention(
    config: ModelConfig, layer: LayerConfig, weights: LayerWeights, rotary: RotaryTable, delta_norm: torch.Tensor | None
) -> AttentionStage:
    return AttentionStage(
        delta_norm=delta_norm,
        norm=weights.input_norm,
        qkv=weights.qkv,
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        cos=rotary.cos,
        sin=rotary.sin,
        scale=config.attention_scale,
        window=layer.window,
        soft_cap=config.attention_soft_cap,
        output=weights.output,
    )


def _feed_forward(config: ModelConfig, layer: LayerConfig, weights: LayerWeights) -> MlpStage | ExpertsStage:
    delta_norm, norm, mlp = weights.attention_output_norm, weights.mlp_input_norm, weights.mlp
    if isinstance(mlp, MlpWeights):
        return MlpStage(delta_norm=delta_norm, norm=norm, weights=mlp, activation=config.activation)
    if layer.experts is None:
        raise ValueError("weights of experts for a layer without")
    return ExpertsStage(
        delta_norm=delta_norm,
        norm=norm,
        router=mlp.router,
        experts=mlp.experts,
        num_active=layer.experts.num_active,
        normalised=layer.experts.normalised,
        activation=config.activation,
    )
