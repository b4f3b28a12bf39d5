"""From what a client sent to what pods compute; what can never be served is refused here, naming field, value, limit.

Steps, because tokenising is expensive: `check` looks at the message alone, `check_text` at the length of large texts,
`resolve` at the tokens. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from proto import common_pb2, inference_pb2
from proto.errors import InvalidRequest, NotFound
from router.model import ServedModel
from router.token_length import TokenLength

MAX_PROMPT_BYTES = 4 * 1024 * 1024
ROLES = ("system", "user", "assistant")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_ID_CHARS = 256  # of request_id and cache_salt


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A request that can be served. `sampling` goes to pods as it is and is never changed; `stop` stays here."""

    client_request_id: str
    prompt_ids: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    user_stop_ids: frozenset[int]
    priority: int
    cache_salt: str

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.HasField("logprobs")


def invalid(field: str, value: object, allowed: str) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(f"{field} = {shown}: {allowed}", field=field)


# --- Before tokenising ----------------------------------------------------------------------------------------------


def check(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Raises InvalidRequest, or NotFound for another model."""
    if request.model not in ("", model.name):
        raise NotFound(f"model = {request.model!r}: this router serves {model.name!r}", field="model")
    _check_label("request_id", request.request_id)
    _check_label("cache_salt", request.cache_salt)
    _check_prompt(request, model)
    _check_sampling(request.sampling, model)
    if request.echo_prompt and request.WhichOneof("prompt") == "chat":
        raise invalid("echo_prompt", True, "must be false for chat messages")


def check_text(field: str, text: str, length: TokenLength | None, max_model_len: int) -> None:
    """Refuses what must have too many tokens, where the tokenizer lets us know."""
    num_tokens = 0 if length is None else length.least_tokens(text)
    if num_tokens >= max_model_len:
        prompt = f"the prompt has {len(text.encode())} bytes, {num_tokens} tokens or more"
        limit = f"at most {max_model_len - 1} are allowed (context length {max_model_len}; 1 token is for the answer)"
        raise InvalidRequest(f"{field}: {prompt}, {limit}", field=field)


def _check_label(field: str, value: str) -> None:
    if len(value) > MAX_ID_CHARS:
        raise invalid(field, value, f"has {len(value)} characters, at most {MAX_ID_CHARS} are allowed")
    if not value.isprintable():
        raise invalid(field, value, "must hold printable characters only")


def _check_prompt(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        _check_bytes("text", [request.text])
    elif kind == "chat":
        if not request.chat.messages:
            raise invalid("chat.messages", [], "must hold at least one message")
        for number, message in enumerate(request.chat.messages):
            if message.role not in ROLES:
                raise invalid(f"chat.messages[{number}].role", message.role, f"must be one of {', '.join(ROLES)}")
        _check_bytes("chat.messages", [message.content for message in request.chat.messages])
    elif kind == "tokens":
        _check_ids("tokens.token_ids", request.tokens.token_ids, model)
    else:
        raise InvalidRequest("prompt: one of text, chat and tokens must be set", field="prompt")


def _check_bytes(field: str, texts: Sequence[str]) -> None:
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes == 0:
        raise invalid(field, "", "the prompt must not be empty")
    if num_bytes > MAX_PROMPT_BYTES:
        raise InvalidRequest(f"{field}: {num_bytes} bytes, at most {MAX_PROMPT_BYTES} are allowed", field=field)


def _check_ids(field: str, ids: Sequence[int], model: ServedModel) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < model.vocab_size):
        return
    for number, token_id in enumerate(ids):
        if not 0 <= token_id < model.vocab_size:
            raise invalid(f"{field}[{number}]", token_id, f"must be in [0, {model.vocab_size})")


def _check_sampling(sampling: common_pb2.SamplingParams, model: ServedModel) -> None:
    _check_ranges(sampling)
    _check_stop(sampling)
    _check_count("sampling.stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    _check_count("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < model.vocab_size:
            raise invalid("sampling.logit_bias", token_id, f"token ids must be in [0, {model.vocab_size})")
        if not -100 <= bias <= 100:
            raise invalid(f"sampling.logit_bias[{token_id}]", bias, "must be in [-100, 100]")


# field -> lowest, highest, whether the lowest itself is allowed. NaN fails every comparison.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, math.inf, True),
    "top_p": (0, 1, False),
    "top_k": (0, math.inf, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0, math.inf, False),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "max_tokens": (1, math.inf, True),
    "min_tokens": (0, math.inf, True),
    "logprobs": (0, MAX_LOGPROBS, True),
}


def _check_ranges(sampling: common_pb2.SamplingParams) -> None:
    for name, (low, high, closed) in _RANGES.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]  # the stub lists each name as a literal
            continue
        value = getattr(sampling, name)
        if not (math.isfinite(value) and (low <= value if closed else low < value) and value <= high):
            raise invalid(f"sampling.{name}", value, _allowed(low, high, closed))


def _allowed(low: float, high: float, closed: bool) -> str:
    if not math.isfinite(high):
        return f"must be a finite number, {'at least' if closed else 'more than'} {low:g}"
    return f"must be in {'[' if closed else '('}{low:g}, {high:g}]"


def _check_stop(sampling: common_pb2.SamplingParams) -> None:
    _check_count("sampling.stop", len(sampling.stop), MAX_STOP_STRINGS)
    for number, text in enumerate(sampling.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            allowed = f"has {len(text)} characters, 1 to {MAX_STOP_CHARS} are allowed"
            raise invalid(f"sampling.stop[{number}]", text, allowed)


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{field}: {count} entries, at most {limit} are allowed", field=field)


# --- After tokenising -----------------------------------------------------------------------------------------------


def resolve(
    request: inference_pb2.GenerateRequest,
    prompt_ids: Sequence[int],
    model: ServedModel,
    max_model_len: int,
    rng: Random,
) -> ResolvedRequest:
    """`max_model_len` is what the pods serve; `rng` draws a seed if the request has none. Raises InvalidRequest."""
    max_tokens, min_tokens = _output_bounds(request, len(prompt_ids), model, max_model_len)
    user_stop_ids = frozenset(request.sampling.stop_token_ids)
    return ResolvedRequest(
        client_request_id=request.request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=_resolve_sampling(request.sampling, model, max_tokens, min_tokens, rng),
        stop=tuple(request.sampling.stop),
        user_stop_ids=user_stop_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _output_bounds(
    request: inference_pb2.GenerateRequest, num_prompt: int, model: ServedModel, max_model_len: int
) -> tuple[int, int]:
    """max_tokens and min_tokens, within the room that the prompt leaves."""
    field, sampling = request.WhichOneof("prompt") or "prompt", request.sampling
    if num_prompt == 0:
        raise InvalidRequest(f"{field}: the prompt has no tokens, at least 1 is needed", field=field)
    room = max_model_len - num_prompt
    length = f"context length {max_model_len}"
    if max_model_len < model.max_model_len:
        length += f", all that a decode pod serves of the model's {model.max_model_len}"
    if room < 1:
        limit = f"at most {max_model_len - 1} are allowed ({length}; 1 token is for the answer)"
        raise InvalidRequest(f"{field}: the prompt has {num_prompt} tokens, {limit}", field=field)
    left = f"the prompt's {num_prompt} tokens leave room for {room} ({length})"
    if sampling.HasField("max_tokens") and sampling.max_tokens > room:
        raise invalid("sampling.max_tokens", sampling.max_tokens, left)
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else room
    if sampling.min_tokens > max_tokens:
        raise invalid("sampling.min_tokens", sampling.min_tokens, f"must not exceed max_tokens {max_tokens}")
    return max_tokens, sampling.min_tokens


_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def _resolve_sampling(
    given: common_pb2.SamplingParams, model: ServedModel, max_tokens: int, min_tokens: int, rng: Random
) -> common_pb2.SamplingParams:
    """Every field that pods read is set: given > the checkpoint's recommendation > neutral."""
    resolved = common_pb2.SamplingParams()
    resolved.CopyFrom(given)
    for name, neutral in _NEUTRAL.items():
        if not given.HasField(name):  # type: ignore[arg-type]  # the stub lists each name as a literal
            setattr(resolved, name, type(neutral)(model.sampling_defaults.get(name, neutral)))
    if not given.HasField("seed"):
        resolved.seed = rng.getrandbits(64)
    resolved.max_tokens, resolved.min_tokens, resolved.ignore_eos = max_tokens, min_tokens, given.ignore_eos
    own = frozenset() if given.ignore_eos else model.eos_token_ids
    del resolved.stop[:]
    resolved.stop_token_ids[:] = sorted({*given.stop_token_ids, *own})
    return resolved
