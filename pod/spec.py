"""A SequenceSpec from the wire, checked again: a pod relies on no router to refuse what would harm it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.batch import ModelInfo
from engine.sequence import SamplingParams, SequenceSpec
from proto import common_pb2, pods_pb2
from proto.errors import InvalidRequest

MAX_ID_CHARS = 256
MAX_LIST = 1024  # entries of logit_bias and of stop_token_ids
MAX_LOGPROBS = 20

# field -> smallest, largest, whether the smallest itself is excluded
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "top_k": (0, 2**31 - 1, False),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, math.inf, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "max_tokens": (1, 2**31 - 1, False),
    "min_tokens": (0, 2**31 - 1, False),
    "logprobs": (0, MAX_LOGPROBS, False),
}
REQUIRED = ("temperature", "seed", "max_tokens")  # their defaults are the router's to choose


def parse_spec(message: pods_pb2.SequenceSpec, model: ModelInfo) -> SequenceSpec:
    """Raises InvalidRequest that names the field, its value and what is allowed."""
    _check_id("sequence.sequence_id", message.sequence_id)
    params = parse_params(message.sampling, model)
    _check_tokens("sequence.prompt_token_ids", message.prompt_token_ids, model)
    _check_tokens("sequence.output_token_ids", message.output_token_ids, model)
    if not message.prompt_token_ids:
        raise refusal("sequence.prompt_token_ids", "empty", "at least one token")
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    if num_tokens >= model.max_model_len:
        allowed = f"below the model's context length {model.max_model_len}"
        raise refusal("sequence.prompt_token_ids", f"{num_tokens} tokens", allowed)
    if len(message.output_token_ids) >= params.max_tokens:
        given = f"{len(message.output_token_ids)} tokens"
        raise refusal("sequence.output_token_ids", given, f"fewer than max_tokens = {params.max_tokens}")
    return SequenceSpec(
        sequence_id=message.sequence_id,
        prompt_ids=tuple(message.prompt_token_ids),
        output_ids=tuple(message.output_token_ids),
        params=params,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def parse_params(message: common_pb2.SamplingParams, model: ModelInfo) -> SamplingParams:
    """Raises InvalidRequest. An absent field is off; those in REQUIRED must be present."""
    present = {field.name: value for field, value in message.ListFields()}
    for name in REQUIRED:
        if name not in present:
            raise refusal(f"sequence.sampling.{name}", "unset", "a value: pods take resolved parameters only")
    values = {name: present[name] for name in RANGES if name in present}
    for name, value in values.items():
        _check_range(f"sequence.sampling.{name}", value, *RANGES[name])
    _check_bias(message, model)
    _check_stops(message)
    num_logprobs = values.pop("logprobs", None)
    return SamplingParams(
        **values,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=num_logprobs,
    )


def refusal(field: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field} = {value}: must be {allowed}", field=field)


def cannot_run(spec: SequenceSpec, error: ValueError) -> InvalidRequest:
    """For the engine's own refusal: too long for its cache, or an id in use."""
    return InvalidRequest(f"sequence {spec.sequence_id!r} cannot run on this pod: {error}", field="sequence")


def check_duration_ms(field: str, value: int, largest: int, smallest: int = 1) -> None:
    if not smallest <= value <= largest:
        raise refusal(field, value, f"in [{smallest}, {largest}]")


def _check_id(field: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise refusal(field, f"{len(value)} characters", f"1 to {MAX_ID_CHARS} characters")


def _check_tokens(field: str, ids: Sequence[int], model: ModelInfo) -> None:
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < model.vocab_size:
            raise refusal(field, token_id, f"in [0, {model.vocab_size})")


def _check_range(field: str, value: float, smallest: float, largest: float, excluded: bool) -> None:
    inside = smallest < value <= largest if excluded else smallest <= value <= largest
    if not (inside and math.isfinite(value)):
        raise refusal(field, value, f"in {'(' if excluded else '['}{smallest}, {largest}] and finite")


def _check_bias(message: common_pb2.SamplingParams, model: ModelInfo) -> None:
    field = "sequence.sampling.logit_bias"
    if len(message.logit_bias) > MAX_LIST:
        raise refusal(field, f"{len(message.logit_bias)} entries", f"at most {MAX_LIST} entries")
    for token_id, bias in message.logit_bias.items():
        if not 0 <= token_id < model.vocab_size:
            raise refusal(field, token_id, f"keyed by token ids in [0, {model.vocab_size})")
        _check_range(f"{field}[{token_id}]", bias, -100.0, 100.0, False)


def _check_stops(message: common_pb2.SamplingParams) -> None:
    if message.stop:
        raise refusal(
            "sequence.sampling.stop", f"{len(message.stop)} strings", "empty: the router matches stop strings"
        )
    if len(message.stop_token_ids) > MAX_LIST:
        given = f"{len(message.stop_token_ids)} ids"
        raise refusal("sequence.sampling.stop_token_ids", given, f"at most {MAX_LIST} ids")
