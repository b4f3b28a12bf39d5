"""Refuses what can never run on this engine, naming the field, the value and the limit. Nothing later checks again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.batch import ModelInfo
from engine.sequence import SamplingParams, SequenceSpec

MAX_LOGPROBS = 20


def validate_spec(spec: SequenceSpec, model: ModelInfo) -> None:
    """Raises ValueError."""
    if not spec.sequence_id:
        raise ValueError("sequence_id = '': must not be empty")
    if not spec.prompt_ids:
        raise ValueError("prompt_ids = (): must hold at least one token")
    _check_ids("prompt_ids", spec.prompt_ids, model)
    _check_ids("output_ids", spec.output_ids, model)
    _validate_params(spec.params, model)
    num_tokens = len(spec.prompt_ids) + len(spec.output_ids)
    if num_tokens >= model.max_model_len:
        limit = model.max_model_len - 1
        raise ValueError(
            f"prompt_ids and output_ids have {num_tokens} tokens: must be at most {limit}, to leave room for one"
        )
    if len(spec.output_ids) >= spec.params.max_tokens:
        raise ValueError(
            f"output_ids has {len(spec.output_ids)} tokens: must be below max_tokens {spec.params.max_tokens}"
        )


def _validate_params(params: SamplingParams, model: ModelInfo) -> None:
    _check("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1")
    _check("min_tokens", params.min_tokens, 0 <= params.min_tokens <= params.max_tokens, "0 .. max_tokens")
    _check_finite("temperature", params.temperature, 0, math.inf)
    _check("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1")
    _check("top_k", params.top_k, params.top_k >= 0, "at least 0")
    _check_finite("min_p", params.min_p, 0, 1)
    _check_finite("repetition_penalty", params.repetition_penalty, 0, math.inf)
    _check("repetition_penalty", params.repetition_penalty, params.repetition_penalty > 0, "above 0")
    _check_finite("presence_penalty", params.presence_penalty, -2, 2)
    _check_finite("frequency_penalty", params.frequency_penalty, -2, 2)
    for token_id, bias in params.logit_bias.items():
        _check_finite(f"logit_bias[{token_id}]", bias, -100, 100)
    _check_ids("logit_bias", params.logit_bias, model)
    _check_ids("stop_token_ids", params.stop_token_ids, model)
    _check("seed", params.seed, 0 <= params.seed < 2**64, "0 .. 2**64 - 1")
    num_logprobs = params.num_logprobs
    _check(
        "num_logprobs", num_logprobs, num_logprobs is None or 0 <= num_logprobs <= MAX_LOGPROBS, f"0 .. {MAX_LOGPROBS}"
    )


def _check(name: str, value: object, is_valid: bool, allowed: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} = {value}: must be {allowed}")


def _check_finite(name: str, value: float, low: float, high: float) -> None:
    _check(name, value, math.isfinite(value) and low <= value <= high, f"finite, {low} .. {high}")


def _check_ids(name: str, token_ids: Iterable[int], model: ModelInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise ValueError(f"{name} holds {token_id}: must be 0 .. {model.vocab_size - 1}")
