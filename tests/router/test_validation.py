"""What is refused, naming field, value and limit; and what pods get of the rest."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from proto import common_pb2, inference_pb2
from proto.errors import InvalidRequest, NotFound
from router.model import ServedModel, load_model
from router.token_length import TokenLength
from router.validation import (
    MAX_LOGIT_BIASES,
    MAX_PROMPT_BYTES,
    MAX_STOP_TOKEN_IDS,
    ResolvedRequest,
    check,
    check_text,
    resolve,
)

FAKE = load_model("fake", "")
MAX_LEN = 100
NAN, INF = float("nan"), float("inf")


def ask(prompt: Any = None, *, request: dict[str, Any] | None = None, **sampling: Any) -> inference_pb2.GenerateRequest:
    prompts = {"text": "hello"} if prompt is None else prompt
    return inference_pb2.GenerateRequest(
        **prompts, **(request or {}), sampling=common_pb2.SamplingParams(**sampling) if sampling else None
    )


def resolved(
    message: inference_pb2.GenerateRequest, num_prompt: int = 10, model: ServedModel = FAKE
) -> ResolvedRequest:
    check(message, model)
    return resolve(message, list(range(num_prompt)), model, MAX_LEN, Random(1))


BAD_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": NAN}, "sampling.temperature", "temperature = nan: must be a finite number, at least 0"),
    ({"temperature": INF}, "sampling.temperature", "= inf"),
    ({"temperature": -0.1}, "sampling.temperature", "= -0.1"),
    ({"top_p": 0.0}, "sampling.top_p", r"must be in \(0, 1\]"),
    ({"top_p": 1.5}, "sampling.top_p", "= 1.5"),
    ({"top_p": NAN}, "sampling.top_p", "= nan"),
    ({"top_k": -1}, "sampling.top_k", "= -1"),
    ({"min_p": 1.1}, "sampling.min_p", r"must be in \[0, 1\]"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty", "must be a finite number, more than 0"),
    ({"presence_penalty": 2.1}, "sampling.presence_penalty", r"\[-2, 2\]"),
    ({"frequency_penalty": -2.1}, "sampling.frequency_penalty", r"\[-2, 2\]"),
    ({"max_tokens": 0}, "sampling.max_tokens", "= 0: must be a finite number, at least 1"),
    ({"max_tokens": -5}, "sampling.max_tokens", "= -5"),
    ({"min_tokens": -1}, "sampling.min_tokens", "= -1"),
    ({"logprobs": 21}, "sampling.logprobs", r"= 21: must be in \[0, 20\]"),
    ({"logprobs": -1}, "sampling.logprobs", "= -1"),
    ({"stop": ["a"] * 17}, "sampling.stop", "17 entries, at most 16"),
    ({"stop": ["x", ""]}, "sampling.stop[1]", "0 characters, 1 to 256"),
    ({"stop": ["x" * 257]}, "sampling.stop[0]", "257 characters"),
    ({"stop_token_ids": [512]}, "sampling.stop_token_ids[0]", r"= 512: must be in \[0, 512\)"),
    ({"stop_token_ids": [-1]}, "sampling.stop_token_ids[0]", "= -1"),
    ({"stop_token_ids": [0] * (MAX_STOP_TOKEN_IDS + 1)}, "sampling.stop_token_ids", "257 entries"),
    ({"logit_bias": {512: 1.0}}, "sampling.logit_bias", r"token ids must be in \[0, 512\)"),
    ({"logit_bias": {1: 101.0}}, "sampling.logit_bias[1]", r"= 101.0: must be in \[-100, 100\]"),
    ({"logit_bias": {1: NAN}}, "sampling.logit_bias[1]", "= nan"),
    ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.0)}, "sampling.logit_bias", "1025 entries"),
    (
        {"max_tokens": 91},
        "sampling.max_tokens",
        r"= 91: .* leave room for 90 \(context length 100, all that .* of the model's 4096\)",
    ),
    ({"max_tokens": 5, "min_tokens": 6}, "sampling.min_tokens", "= 6: must not exceed max_tokens 5"),
    ({"min_tokens": 91}, "sampling.min_tokens", "= 91: must not exceed max_tokens 90"),
]


@pytest.mark.parametrize(("sampling", "field", "message"), BAD_SAMPLING)
def test_bad_sampling(sampling: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        resolved(ask(**sampling))
    assert caught.value.field == field


BAD_PROMPTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "one of text, chat and tokens"),
    ({"text": ""}, "text", "must not be empty"),
    ({"text": "x" * (MAX_PROMPT_BYTES + 1)}, "text", f"{MAX_PROMPT_BYTES + 1} bytes, at most {MAX_PROMPT_BYTES}"),
    ({"chat": inference_pb2.ChatPrompt()}, "chat.messages", "at least one message"),
    (
        {"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(content="x")])},
        "chat.messages[0].role",
        "must be one of system, user, assistant",
    ),
    (
        {"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="elf", content="x")])},
        "chat.messages[0].role",
        "'elf': must be one of system, user, assistant",
    ),
    (
        {"chat": inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user")])},
        "chat.messages",
        "must not be empty",
    ),
    ({"tokens": inference_pb2.TokenPrompt(token_ids=[1, 600])}, "tokens.token_ids[1]", r"= 600: must be in \[0, 512\)"),
]


@pytest.mark.parametrize(("prompt", "field", "message"), BAD_PROMPTS)
def test_bad_prompts(prompt: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check(ask(prompt), FAKE)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("num_prompt", "message"),
    [
        (0, "the prompt has no tokens, at least 1 is needed"),
        (100, r"the prompt has 100 tokens, at most 99 are allowed \(context length 100"),
        (5000, "the prompt has 5000 tokens, at most 99"),
    ],
)
def test_bad_lengths(num_prompt: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        resolved(ask(), num_prompt)
    assert caught.value.field == "text"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "a\x00b"}, "request_id"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_bad_labels(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(ask(request=fields), FAKE)
    assert caught.value.field == field
    assert len(caught.value.message) < 200, "a long value is shortened"


def test_odd_but_harmless_labels_pass() -> None:
    check(ask(request={"request_id": "pdserve:*?[x] ünï/..\\ 'quoted'"}), FAKE)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="model = 'gpt': this router serves 'fake'") as caught:
        check(ask(request={"model": "gpt"}), FAKE)
    assert caught.value.field == "model"
    check(ask(request={"model": "fake"}), FAKE)


def test_a_chat_cannot_be_echoed() -> None:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="x")])
    with pytest.raises(InvalidRequest, match="echo_prompt"):
        check(ask({"chat": chat}, request={"echo_prompt": True}), FAKE)


def test_everything_pods_read_is_resolved() -> None:
    request = resolved(ask(stop=["END"], stop_token_ids=[7]))
    sampling = request.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"):
        assert sampling.HasField(name)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.min_tokens) == (1.0, 1.0, 90, 0)
    assert list(sampling.stop_token_ids) == [7, 511], "the end of text is added"
    assert (request.user_stop_ids, request.stop, list(sampling.stop)) == (frozenset({7}), ("END",), [])
    assert not request.wants_logprobs


def test_ignore_eos_keeps_only_the_users_stop_ids() -> None:
    assert list(resolved(ask(ignore_eos=True, stop_token_ids=[7])).sampling.stop_token_ids) == [7]


def test_seeds_are_drawn_or_kept() -> None:
    drawn = resolve(ask(), [1], FAKE, MAX_LEN, Random(5)).sampling.seed
    assert drawn == Random(5).getrandbits(64)
    assert resolved(ask(seed=0)).sampling.seed == 0
    assert resolved(ask(seed=2**64 - 1)).sampling.seed == 2**64 - 1


def test_the_checkpoints_recommendations_are_defaults_only() -> None:
    model = ServedModel(
        name="m",
        model_id="m",
        vocab_size=512,
        max_model_len=100,
        eos_token_ids=frozenset(),
        sampling_defaults={"temperature": 0.6, "top_k": 20},
    )
    sampling = resolved(ask(top_k=3), model=model).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 3, 1.0)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    check_text("text", "é" * 10, TokenLength(2), 11)
    check_text("text", "x" * 1_000_000, None, 11)
    expected = (
        "text: the prompt has 21 bytes, 11 tokens or more, at most 10 are allowed "
        "(context length 11; 1 token is for the answer)"
    )
    with pytest.raises(InvalidRequest) as refused:
        check_text("text", "é" * 10 + "x", TokenLength(2), 11)
    assert (refused.value.message, refused.value.field) == (expected, "text")


def test_the_clients_message_is_not_changed() -> None:
    message = ask(stop=["x"])
    before = message.SerializeToString(deterministic=True)
    resolved(message)
    assert message.SerializeToString(deterministic=True) == before
