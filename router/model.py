"""What the router must know of the model it serves: its names, sizes and defaults. Reads two small JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proto.settings import ConfigError

FAKE = "fake"
FAKE_VOCAB_SIZE = 512
FAKE_EOS = 511
FAKE_MAX_MODEL_LEN = 4096

_DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelError(ConfigError):
    """One line that says what is wrong with the model directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`sampling_defaults` are the checkpoint's own recommendations, for parameters that a request leaves unset."""

    name: str  # what clients ask for
    model_id: str  # what pods of this model call it
    vocab_size: int
    max_model_len: int  # as config.json states it; pods may serve less, or more
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


def load_model(path: str, served_name: str) -> ServedModel:
    """`path` is a Hugging Face directory or "fake". Raises ModelError."""
    if path == FAKE:
        return ServedModel(
            name=served_name or FAKE,
            model_id=FAKE,
            vocab_size=FAKE_VOCAB_SIZE,
            max_model_len=FAKE_MAX_MODEL_LEN,
            eos_token_ids=frozenset({FAKE_EOS}),
        )
    directory = Path(path)
    config = _read_json(directory / "config.json")
    recommended = directory / "generation_config.json"
    generation = _read_json_if_any(recommended)
    model_id = _model_id(directory)
    try:
        return ServedModel(
            name=served_name or model_id,
            model_id=model_id,
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(config["max_position_embeddings"]),
            eos_token_ids=_eos_ids(generation, recommended) | _eos_ids(config, directory / "config.json"),
            sampling_defaults=_sampling_defaults(generation, recommended),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"model {directory}: config.json: {error!r}") from None


def _sampling_defaults(generation: Mapping[str, Any], source: Path) -> dict[str, float]:
    defaults = {name: generation[name] for name in _DEFAULTABLE if generation.get(name) is not None}
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"model: {source}: {name} = {value!r}: must be a number")
    return defaults


def _model_id(directory: Path) -> str:
    """As pods name it: what the directory was converted from, else its own name."""
    return str(_read_json_if_any(directory / "source.json").get("model_id", directory.resolve().name))


def _read_json_if_any(file: Path) -> dict[str, Any]:
    return _read_json(file) if file.exists() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model: cannot read {file}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model: {file} must hold an object")
    return content


def _eos_ids(values: Mapping[str, Any], source: Path) -> frozenset[int]:
    """Checkpoints name no, one or several end-of-text ids."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(f"model: {source}: eos_token_id = {value!r}: must be a token id, a list of them or null")
    return frozenset(ids)
