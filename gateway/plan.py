"""From a validated body to a plan: the router calls that answer it, one a choice, and how to present them.

`n` choices of a prompt are n calls. With a `seed`, choice i of each prompt draws with seed + i, so a choice can be
reproduced alone. A prompt of a list is answered exactly as it would be alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.errors import invalid
from gateway.requests import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody
from proto.common_pb2 import SamplingParams
from proto.inference_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenPrompt

MAX_PLAN_BYTES = 64 * 2**20  # of the calls of one HTTP request, each of which has its own copy of its prompt
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens; a chat answer may fill the context

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`calls[i]` produces choice i. `n` consecutive calls share a prompt."""

    calls: tuple[GenerateRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    echo: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # the router's field -> the client's, where they differ
    is_prompt_list: bool = False

    def param(self, router_field: str, choice: int) -> str | None:
        """What the client calls `router_field` of a choice's call; None for no field."""
        name = router_field.removeprefix("sampling.").removeprefix("chat.")
        for theirs, ours in self.names.items():
            if name == theirs or name.startswith((f"{theirs}[", f"{theirs}.")):
                place = f"[{choice // self.n}]" if ours == "prompt" and self.is_prompt_list else ""
                return ours + place + name[len(theirs) :]
        return name or None


def plan_chat(body: ChatBody, request_id: str) -> Plan:
    """Raises ApiError."""
    max_tokens = _chat_max_tokens(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", f"'top_logprobs' = {body.top_logprobs} needs 'logprobs' = true")
    top = (body.top_logprobs or 0) if body.logprobs else None
    prompt = GenerateRequest(chat=ChatPrompt(messages=[_message(m.role, m.text(), m.name) for m in body.messages]))
    names = {"chat": "messages", "prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names |= {"max_tokens": "max_completion_tokens"}
    return _plan(body, [prompt], request_id, max_tokens, top, names)


def plan_completion(body: CompletionBody, request_id: str) -> Plan:
    """Raises ApiError."""
    if body.echo and body.logprobs is not None:
        raise invalid("logprobs", "'logprobs' with 'echo' = true is not supported: prompt tokens get no logprobs")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _check_choices(len(body.prompts), body.n)
    prompts = [_prompt(prompt, echo=body.echo) for prompt in body.prompts]
    names = {"text": "prompt", "tokens.token_ids": "prompt", "tokens": "prompt"}
    plan = _plan(body, prompts, request_id, max_tokens, body.logprobs, names)
    return replace(plan, echo=body.echo, is_prompt_list=body.is_prompt_list)


def _plan(
    body: GenerationBody,
    prompts: Sequence[GenerateRequest],
    request_id: str,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str],
) -> Plan:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "'stream_options' is only allowed with 'stream' = true")
    common = _common(body, request_id, max_tokens, logprobs)
    _check_size(body.n, sum(prompt.ByteSize() + common.ByteSize() for prompt in prompts))
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    return Plan(
        calls=tuple(_call(common, prompt, _seed(body, choice)) for prompt in prompts for choice in range(body.n)),
        n=body.n,
        stream=body.stream,
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and options.continuous_usage_stats,
        logprobs=logprobs is not None,
        names=names,
    )


def _check_choices(num_prompts: int, n: int) -> None:
    """Before anything is made of the choices."""
    if num_prompts * n > MAX_CHOICES:
        message = f"{num_prompts} prompts times 'n' = {n} is too many: at most {MAX_CHOICES} choices a request"
        raise invalid("n" if n > 1 else "prompt", message)


def _check_size(n: int, num_bytes: int) -> None:
    """Before a prompt of megabytes is copied for each choice."""
    if n * num_bytes > MAX_PLAN_BYTES:
        raise invalid("n", f"'n' = {n} times {num_bytes} bytes is too much: at most {MAX_PLAN_BYTES} in all")


def _common(body: GenerationBody, request_id: str, max_tokens: int | None, logprobs: int | None) -> GenerateRequest:
    """What all calls share. What the client left out stays unset: the router fills in the model's defaults."""
    sampling = SamplingParams(
        logit_bias=body.logit_bias,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        max_tokens=max_tokens,
        logprobs=logprobs,
    )
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    return GenerateRequest(
        request_id=request_id,
        model=body.model,
        sampling=sampling,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def _seed(body: GenerationBody, choice: int) -> int | None:
    return None if body.seed is None else (body.seed + choice) % 2**64


def _call(common: GenerateRequest, prompt: GenerateRequest, seed: int | None) -> GenerateRequest:
    call = GenerateRequest(sampling=SamplingParams(seed=seed))
    call.MergeFrom(common)
    call.MergeFrom(prompt)
    return call


def _chat_max_tokens(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid(
            "max_tokens", f"'max_tokens' = {old} contradicts 'max_completion_tokens' = {new}: give one of them"
        )
    return old if new is None else new


def _message(role: str, content: str, name: str) -> ChatMessage:
    """OpenAI renamed `system` to `developer`; chat templates know the old name."""
    return ChatMessage(role="system" if role == "developer" else role, content=content, name=name)


def _prompt(prompt: str | list[int], *, echo: bool) -> GenerateRequest:
    """Only the router can turn token ids into the text to echo."""
    if isinstance(prompt, str):
        return GenerateRequest(text=prompt)
    return GenerateRequest(tokens=TokenPrompt(token_ids=prompt), echo_prompt=echo)
