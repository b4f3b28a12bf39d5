"""How a model's weights are quantised: by us when it is loaded, or in its checkpoint already. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.config_fields import CheckpointError, Fields

# none: weights stay as the checkpoint has them. gguf: a GGUF file's own blocks instead of bfloat16.
Quantization = Literal["none", "int8", "int4", "gguf"]
Method = Literal["awq", "gptq", "gguf"]

QUANTIZER_VERSION = 4  # raise it when the same weights would become other integers, or lie in another order
BLOCKS_SUFFIX = ".gguf_blocks"  # in place of .weight, where gguf_convert.py kept a file's blocks
GPTQ_SUFFIX = ".qweight"  # of AWQ too
BYTES_PER_WEIGHT = {"int8": 1.0, "int4": 0.5 + 4 / 32}  # with scale and offset, 16 bits each, for 32 weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """What a checkpoint's quantization_config says. group_size: columns that share a scale; None: all.

    zero_offset: what is added to each stored zero point, with carries inside its word of 32 bits. act_order: a group's
    columns lie anywhere in the row.
    """

    method: Method
    bits: int = 4
    group_size: int | None = None
    zero_offset: int = 0
    act_order: bool = False


def parse_quantization(values: Mapping[str, Any] | None, source: str) -> StoredQuantization | None:
    """values: config.json's quantization_config. Raises CheckpointError for what cannot be computed."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{source}: quantization_config = {values!r}: must be an object")
    fields = Fields(values, f"{source}: quantization_config")
    match values.get("quant_method"):
        case "gguf":
            return StoredQuantization(method="gguf")
        case "awq":
            return _parse_awq(fields, values)
        case "gptq":
            return _parse_gptq(fields, values)
    raise fields.error("quant_method", f"only {', '.join(get_args(Method))} are supported")


def quantized_revision(revision: str, quantization: str) -> str:
    """A checkpoint's revision with the weights that `quantization` makes of it."""
    return f"{revision}+{quantization}.{QUANTIZER_VERSION}" if quantization in BYTES_PER_WEIGHT else revision


def check_quantization(quantization: str, stored: StoredQuantization | None, source: str) -> None:
    """Raises CheckpointError when `quantization` is unknown or does not go with what the checkpoint holds."""
    if quantization not in get_args(Quantization):
        raise CheckpointError(f"quantization {quantization!r}: must be {', '.join(get_args(Quantization))}")
    if quantization in BYTES_PER_WEIGHT and stored is not None:
        raise CheckpointError(
            f"quantization {quantization!r}: the weights of {source} are quantised already ({stored.method}): use none"
        )
    if quantization == "gguf" and (stored is None or stored.method != "gguf"):
        others = "none" if stored else "none, int8 or int4"
        raise CheckpointError(
            f"quantization 'gguf': {source} has no blocks of a GGUF file: give the GGUF file itself, or use {others}"
        )


def _parse_awq(fields: Fields, values: Mapping[str, Any]) -> StoredQuantization:
    _check_layout(fields, values, ("version", "checkpoint_format", "format"), ("gemm",))
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "only true is supported")
    if fields.integer("bits", 4) != 4:
        raise fields.error("bits", "AWQ weights must have 4")
    return StoredQuantization(method="awq", group_size=_group_size(fields, values))


def _parse_gptq(fields: Fields, values: Mapping[str, Any]) -> StoredQuantization:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.error("bits", "GPTQ weights must have 4 or 8")
    layout = _check_layout(fields, values, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    zero_offset = 1 if layout == "gptq" else 0  # the first version stored zero points less one
    group_size = _group_size(fields, values)
    return StoredQuantization(
        method="gptq",
        bits=bits,
        group_size=group_size,
        zero_offset=zero_offset,
        act_order=fields.flag("desc_act", False) and group_size is not None,
    )


def _check_layout(fields: Fields, values: Mapping[str, Any], names: tuple[str, ...], supported: tuple[str, ...]) -> str:
    """What the first of `names` that is there says, in lower case: libraries differ. Absent, the first supported."""
    name = next(filter(fields.has, names), names[0])
    layout = str(values[name]).lower() if fields.has(name) else supported[0]
    if layout not in supported:
        raise fields.error(name, f"must be {' or '.join(map(repr, supported))}")
    return layout


def _group_size(fields: Fields, values: Mapping[str, Any]) -> int | None:
    if values.get("group_size") == -1:
        return None
    size = fields.integer("group_size", 128)
    if size not in (32, 64) and size % 128:
        raise fields.error("group_size", "must be -1, 32, 64 or a multiple of 128")
    return size
