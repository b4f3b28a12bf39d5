"""Every supported field arrives in the router's request, and nothing is invented for those left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.body import parse
from gateway.errors import ApiError
from gateway.plan import Plan, plan_chat, plan_completion
from gateway.requests import ChatBody, CompletionBody
from proto.common_pb2 import SamplingParams
from proto.inference_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenPrompt

HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Plan:
    return plan_chat(parse(ChatBody, json.dumps({"messages": HELLO, **fields}).encode()), "client-1")


def completion(**fields: Any) -> Plan:
    return plan_completion(parse(CompletionBody, json.dumps({"prompt": "hi", **fields}).encode()), "client-1")


def test_nothing_is_set_that_the_client_left_out() -> None:
    expected = GenerateRequest(
        request_id="client-1", chat=ChatPrompt(messages=[ChatMessage(role="user", content="hi")])
    )
    expected.sampling.SetInParent()
    assert chat().calls == (expected,)


def test_a_completion_has_16_tokens_unless_told_otherwise() -> None:
    assert completion().calls[0] == GenerateRequest(
        request_id="client-1", text="hi", sampling=SamplingParams(max_tokens=16)
    )
    assert completion(max_tokens=3).calls[0].sampling.max_tokens == 3


COMMON: list[tuple[str, Any, SamplingParams]] = [
    ("temperature", 0, SamplingParams(temperature=0)),
    ("temperature", 0.5, SamplingParams(temperature=0.5)),
    ("top_p", 0.9, SamplingParams(top_p=0.9)),
    ("top_k", 40, SamplingParams(top_k=40)),
    ("min_p", 0.1, SamplingParams(min_p=0.1)),
    ("repetition_penalty", 1.1, SamplingParams(repetition_penalty=1.1)),
    ("presence_penalty", -2, SamplingParams(presence_penalty=-2)),
    ("frequency_penalty", 2, SamplingParams(frequency_penalty=2)),
    ("logit_bias", {"50256": -100, "7": 1.5}, SamplingParams(logit_bias={50256: -100, 7: 1.5})),
    ("seed", 0, SamplingParams(seed=0)),
    ("seed", -1, SamplingParams(seed=2**64 - 1)),
    ("seed", 2**64 - 1, SamplingParams(seed=2**64 - 1)),
    ("stop", "a", SamplingParams(stop=["a"])),
    ("stop", ["a", "b"], SamplingParams(stop=["a", "b"])),
    ("stop_token_ids", [1, 2], SamplingParams(stop_token_ids=[1, 2])),
    ("max_tokens", 7, SamplingParams(max_tokens=7)),
    ("min_tokens", 3, SamplingParams(min_tokens=3)),
    ("ignore_eos", True, SamplingParams(ignore_eos=True)),
]


@pytest.mark.parametrize(("name", "value", "expected"), COMMON, ids=[f"{row[0]}={row[1]}" for row in COMMON])
def test_sampling_fields(name: str, value: Any, expected: SamplingParams) -> None:
    assert chat(**{name: value}).calls[0].sampling == expected
    sampling = completion(**{name: value}).calls[0].sampling
    if name != "max_tokens":
        sampling.ClearField("max_tokens")
    assert sampling == expected


def test_logprobs_of_both_endpoints() -> None:
    assert not chat(logprobs=False).calls[0].sampling.HasField("logprobs")
    assert chat(logprobs=True).calls[0].sampling.logprobs == 0
    assert chat(logprobs=True).calls[0].sampling.HasField("logprobs")
    assert chat(logprobs=True, top_logprobs=5).calls[0].sampling.logprobs == 5
    assert completion(logprobs=0).calls[0].sampling.HasField("logprobs")
    assert completion(logprobs=3).calls[0].sampling.logprobs == 3


def test_request_fields() -> None:
    call = completion(model="m", priority=-3, cache_salt="tenant").calls[0]
    assert (call.model, call.priority, call.cache_salt) == ("m", -3, "tenant")


def test_either_name_of_the_token_limit() -> None:
    assert chat(max_completion_tokens=5).calls[0].sampling.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).calls[0].sampling.max_tokens == 5
    assert chat(max_tokens=5).param("sampling.max_tokens", 0) == "max_tokens"
    assert chat(max_completion_tokens=5).param("sampling.max_tokens", 0) == "max_completion_tokens"


def test_messages() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]
    assert list(chat(messages=messages).calls[0].chat.messages) == [
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="a\nb", name="Ann"),
        ChatMessage(role="assistant", content=""),
    ]


def test_prompts_and_choices_in_order() -> None:
    plan = completion(prompt=[[1, 2], [3]], n=2, seed=2**64 - 1, echo=True)
    assert [(list(c.tokens.token_ids), c.sampling.seed) for c in plan.calls] == [
        ([1, 2], 2**64 - 1),
        ([1, 2], 0),
        ([3], 2**64 - 1),
        ([3], 0),
    ]
    assert all(call.echo_prompt for call in plan.calls)
    assert completion(prompt=[[]]).calls[0].tokens == TokenPrompt()


def test_without_a_seed_every_choice_draws_its_own() -> None:
    assert not any(call.sampling.HasField("seed") for call in chat(n=3).calls)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("", None),
        ("model", "model"),
        ("sampling.top_k", "top_k"),
        ("top_k", "top_k"),
        ("chat", "messages"),
        ("chat.messages[1].role", "messages[1].role"),
        ("prompt", "messages"),
        ("sampling.logprobs", "top_logprobs"),
    ],
)
def test_names_of_the_routers_fields_for_a_chat(field: str, param: str | None) -> None:
    assert chat(n=2).param(field, 1) == param


@pytest.mark.parametrize(
    ("field", "param"),
    [("text", "prompt"), ("tokens", "prompt"), ("tokens.token_ids[7]", "prompt[7]"), ("logprobs", "logprobs")],
)
def test_names_of_the_routers_fields_for_a_completion(field: str, param: str | None) -> None:
    assert completion(n=2).param(field, 1) == param


@pytest.mark.parametrize("prompt", [["hi", "ho"], [[1], [2]]])
@pytest.mark.parametrize(
    ("field", "param"),
    [("text", "prompt[1]"), ("tokens", "prompt[1]"), ("tokens.token_ids[7]", "prompt[1][7]"), ("top_k", "top_k")],
)
def test_names_of_the_routers_fields_in_a_list_of_prompts(prompt: list[Any], field: str, param: str) -> None:
    plan = completion(prompt=prompt, n=3)
    assert [plan.param(field, choice) for choice in (3, 4, 5)] == [param] * 3


def test_usage_in_every_chunk_needs_usage_at_all() -> None:
    options = {"continuous_usage_stats": True}
    assert not completion(stream=True, stream_options=options).continuous_usage
    assert completion(stream=True, stream_options={**options, "include_usage": True}).continuous_usage


def test_too_many_choices_name_the_field_to_change() -> None:
    with pytest.raises(ApiError, match="129 prompts") as caught:
        completion(prompt=["a"] * 129)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("fields", [{"prompt": "x" * 2**20, "n": 64}, {"prompt": ["x" * 2**20] * 2, "n": 32}])
def test_a_prompt_of_megabytes_is_not_copied_for_each_of_many_choices(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="is too much: at most 67108864 in all") as raised:
        completion(**fields)
    assert raised.value.param == "n"
