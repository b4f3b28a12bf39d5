"""Rotary settings of a checkpoint, as its config.json spells them. No torch here.

Three spellings are read: `rope_theta` + `rope_scaling`, the `rope_parameters` of newer files, and the same with one
object for each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config_fields import CheckpointError, Fields
from engine.families import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary settings. Fields that `type` does not use keep their defaults. dim: of a head, the first ones rotate."""

    type: str = "default"
    dim: int
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    short_factor: tuple[float, ...] = ()  # longrope: stretches each pair's wave, up to the trained length


def parse_rope(values: Mapping[str, Any], family: Family, head_dim: int, source: str) -> RopeConfig:
    """The angles of all layers, or with `family.local_rope` of those without a window. Raises CheckpointError."""
    Fields(values, source).optional_number("rope_theta")  # also where rope_parameters has its own
    scaling, parameters = _object(values, "rope_scaling", source), _parameters(values, family, "full_attention", source)
    if scaling and parameters and {**parameters, **scaling} != parameters:
        raise CheckpointError(f"{source}: rope_scaling = {scaling!r}: contradicts rope_parameters: keep one of the two")
    return _parse(_completed(parameters or scaling, values), family, head_dim, source)


def parse_local_rope(values: Mapping[str, Any], family: Family, head_dim: int, source: str) -> RopeConfig | None:
    """The angles of layers with a window where the family has such. Raises CheckpointError."""
    if not family.local_rope:
        return None
    rope = _parameters(values, family, "sliding_attention", source)
    local = {**values, "rope_theta": values.get("rope_local_base_freq")}
    return _parse(_completed(rope, local), family, head_dim, source)


def _object(values: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    rope = values.get(name) or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{source}: {name} = {rope!r}: must be an object")
    return rope


def _parameters(values: Mapping[str, Any], family: Family, layer_type: str, source: str) -> Mapping[str, Any]:
    """rope_parameters of layers of `layer_type`."""
    rope = _object(values, "rope_parameters", source)
    is_nested = any(isinstance(value, Mapping) for value in rope.values())
    if rope and is_nested != family.local_rope:
        allowed = (
            "must hold an object for each kind of layer" if family.local_rope else "must be the same for all layers"
        )
        raise CheckpointError(f"{source}: rope_parameters = {rope!r}: {allowed}")
    return _object(rope, layer_type, source) if is_nested else rope


def _completed(rope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary object, completed from the top level in transformers' order of precedence."""
    trained = values.get("original_max_position_embeddings")
    return {
        "rope_theta": values.get("rope_theta"),
        "partial_rotary_factor": values.get("partial_rotary_factor"),
        "original_max_position_embeddings": values.get("max_position_embeddings"),
        "stated_length": values.get("max_position_embeddings"),
        **rope,
        **({} if trained is None else {"original_max_position_embeddings": trained}),
    }


def _parse(rope: dict[str, Any], family: Family, head_dim: int, source: str) -> RopeConfig:
    fields = Fields(rope, source)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "longrope" if kind == "su" and "longrope" in family.rope_types else kind  # its first name
    if kind not in family.rope_types:
        raise CheckpointError(f"{source}: rope_type = {kind!r}: supported are {', '.join(family.rope_types)}")
    dim = _rotary_dim(fields, family, head_dim)
    _refuse_degenerate(kind, fields)
    trained = fields.integer("original_max_position_embeddings", 2048)
    factor = fields.number("factor", _default_factor(kind, fields, trained))
    return RopeConfig(
        type=kind,
        dim=dim,
        theta=fields.number("rope_theta", 10_000.0),
        factor=factor,
        original_max_position_embeddings=trained,
        low_freq_factor=fields.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=fields.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=_attention_factor(kind, fields, factor, trained),
        truncate=fields.flag("truncate", True),
        short_factor=_short_factor(fields, dim) if kind == "longrope" else (),
    )


def _refuse_degenerate(kind: str, fields: Fields) -> None:
    """Values at which a formula divides by zero."""
    if kind == "yarn" and fields.number("rope_theta", 10_000.0) <= 1:
        raise fields.error("rope_theta", "must be above 1 for yarn")
    if kind == "longrope" and fields.integer("original_max_position_embeddings", 2048) == 1:
        raise fields.error("original_max_position_embeddings", "must be above 1 for longrope")
    if kind == "llama3" and fields.number("high_freq_factor") <= fields.number("low_freq_factor"):
        raise fields.error("high_freq_factor", "must be above low_freq_factor")


def _rotary_dim(fields: Fields, family: Family, head_dim: int) -> int:
    part = fields.number("partial_rotary_factor", 1.0)
    if part == 1.0:
        return head_dim
    if not family.partial_rope:
        raise fields.error("partial_rotary_factor", f"only whole heads can be rotated for {family.title}")
    dim = int(head_dim * part)
    if not 2 <= dim <= head_dim or dim % 2:
        raise fields.error("partial_rotary_factor", f"of {head_dim} dimensions an even number must be rotated")
    return dim


def _default_factor(kind: str, fields: Fields, trained: int) -> float | None:
    if kind == "longrope":
        return fields.integer("stated_length", 2048) / trained
    return 1.0 if kind == "default" else None


def _attention_factor(kind: str, fields: Fields, factor: float, trained: int) -> float:
    if kind not in {"yarn", "longrope"}:
        return 1.0
    if fields.has("attention_factor"):
        return fields.number("attention_factor")
    return _yarn_attention_factor(fields, factor) if kind == "yarn" else _longrope_attention_factor(factor, trained)


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    """The temperature of YaRN (Peng et al. 2023, section 3.4), with DeepSeek's mscale pair where a file gives it."""
    if fields.has("mscale") and fields.has("mscale_all_dim"):
        return _mscale(factor, fields.number("mscale")) / _mscale(factor, fields.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope_attention_factor(factor: float, trained: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))


def _short_factor(fields: Fields, dim: int) -> tuple[float, ...]:
    factors = fields.items("short_factor")
    numbers = all(isinstance(f, int | float) and not isinstance(f, bool) and 0 < f < math.inf for f in factors)
    if len(factors) != dim // 2 or not numbers:
        raise fields.error("short_factor", f"must be {dim // 2} numbers above 0")
    return tuple(map(float, factors))
