"""Tables of rotary angles, with the scaling variants of checkpoints.

Everything is float32 and computed with the operations, in the order, of transformers, so that the tables are its own to
the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos, sin: float32 [P, R/2] of position and pair."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_table(rope: RopeConfig, num_positions: int) -> RotaryTable:
    """The table for positions 0 .. num_positions - 1."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope)
    scale = rope.attention_factor
    return RotaryTable(angles.cos() * scale, angles.sin() * scale)


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """float32 [R/2]: radians a position for each pair."""
    frequencies = 1.0 / _wave_bases(rope)
    match rope.type:
        case "linear":  # kaiokendev 2023: all positions squeezed
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(rope)
        case "longrope":  # Ding et al. 2024, up to the trained length (ModelConfig.max_model_len)
            return 1.0 / (torch.tensor(rope.short_factor) * _wave_bases(rope))
        case _:  # "default", and "dynamic" up to the trained length (ModelConfig.max_model_len)
            return frequencies


def _wave_bases(rope: RopeConfig) -> torch.Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    return torch.pow(rope.theta, exponents)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    trained = rope.original_max_position_embeddings
    longest_kept, shortest_stretched = trained / rope.high_freq_factor, trained / rope.low_freq_factor
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > shortest_stretched, frequencies / rope.factor, frequencies)
    smooth = (trained / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    return torch.where((waves >= longest_kept) & (waves <= shortest_stretched), between, stretched)


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """Peng et al. 2023: pairs that turn more than beta_fast times in the trained length are kept, fewer than beta_slow
    stretched, with a linear ramp between."""
    bases = _wave_bases(rope)
    kept, stretched = 1.0 / bases, 1.0 / (rope.factor * bases)
    low, high = _yarn_dimension(rope.beta_fast, rope), _yarn_dimension(rope.beta_slow, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return stretched * (1 - keep) + kept * keep


def _yarn_dimension(turns: float, rope: RopeConfig) -> float:
    """The (fractional) pair that turns `turns` times in the trained length."""
    trained = rope.original_max_position_embeddings
    return rope.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
