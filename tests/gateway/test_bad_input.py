"""Every bad request is refused with the right status, in OpenAI's shape, naming the field. The router hears of none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from gateway.app import build_app
from gateway.errors import _CODES
from gateway.metrics import Metrics
from gateway.requests import ChatBody, CompletionBody, Message, StreamOptions
from gateway.unsupported import IGNORED, NEUTRAL
from proto import common_pb2 as pb
from proto.errors import CODES
from router.gateway_client import GatewayClient
from tests.gateway.conftest import BODY_LIMITS
from tests.gateway.scripted import ScriptedRouter

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def app_client(router: ScriptedRouter) -> AsyncIterator[httpx.AsyncClient]:
    """The app without a server in between."""
    async with GatewayClient(router.address) as client:
        app = build_app(client, Metrics(), BODY_LIMITS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            yield http


def check_shape(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    return error


BOTH: list[tuple[str, Any, str, str]] = [
    # field, value, param, words of the message
    ("model", 5, "model", "string"),
    ("stream", "yes", "stream", "boolean"),
    ("stream_options", {"include_usage": True}, "stream_options", "'stream' = true"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage", "boolean"),
    ("stream_options", 5, "stream_options", "object"),
    ("n", 0, "n", "greater than or equal to 1"),
    ("n", 129, "n", "less than or equal to 128"),
    ("n", True, "n", "integer"),
    ("max_tokens", 1.5, "max_tokens", "integer"),
    ("max_tokens", "1", "max_tokens", "integer"),
    ("max_tokens", 2**31, "max_tokens", "2147483648"),
    ("temperature", float("nan"), "temperature", "finite"),
    ("temperature", float("inf"), "temperature", "finite"),
    ("temperature", 10**400, "temperature", "number"),
    ("temperature", "0.5", "temperature", "number"),
    ("temperature", [], "temperature", "number"),
    ("top_p", float("-inf"), "top_p", "finite"),
    ("presence_penalty", {}, "presence_penalty", "number"),
    ("frequency_penalty", True, "frequency_penalty", "number"),
    ("logit_bias", [], "logit_bias", "object"),
    ("logit_bias", {"a": 1}, "logit_bias", "token id"),
    ("logit_bias", {"-1": 1}, "logit_bias", "token id"),
    ("logit_bias", {"²": 1}, "logit_bias", "token id"),
    ("logit_bias", {"007": 1}, "logit_bias", "token id"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias", "token id"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias", "1025 entries, at most 1024 are allowed"),
    ("logit_bias", {"1": 101}, "logit_bias", "[-100, 100]"),
    ("logit_bias", {"1": float("nan")}, "logit_bias", "[-100, 100]"),
    ("logit_bias", {"1": "5"}, "logit_bias", "number"),
    ("seed", 2**64, "seed", "18446744073709551616"),
    ("seed", -(2**63) - 1, "seed", "-9223372036854775808"),
    ("seed", 1.0, "seed", "integer"),
    ("stop", 5, "stop", "a string or a list of strings"),
    ("stop", ["a", 5], "stop[1]", "a string or a list of strings"),
    ("stop", ["a"] * 17, "stop", "17 entries, at most 16 are allowed"),
    ("stop", [5] * 17, "stop", "17 entries, at most 16 are allowed"),
    ("stop", "a" * 257, "stop[0]", "at most 256 characters"),
    ("stop_token_ids", [1] * 257, "stop_token_ids", "257 entries, at most 256 are allowed"),
    ("cache_salt", "a" * 257, "cache_salt", "at most 256 characters"),
    ("stop_token_ids", ["a"], "stop_token_ids[0]", "integer"),
    ("stop_token_ids", [-1], "stop_token_ids[0]", "greater than or equal to 0"),
    ("priority", 2**40, "priority", "less than"),
    ("cache_salt", 1, "cache_salt", "string"),
    ("tools", [{"type": "function"}], "tools", "not supported"),
    ("response_format", {"type": "json_object"}, "response_format", 'only {"type":"text"} is'),
    ("reasoning_effort", "low", "reasoning_effort", "leave it out"),
    ("use_beam_search", True, "use_beam_search", "not supported"),
    ("temprature", 0.5, "temprature", "not a known field"),
]
COMPLETION_ONLY: list[tuple[str, Any, str, str]] = [
    ("prompt", None, "prompt", "required"),
    ("prompt", 5, "prompt", "list of token ids"),
    ("prompt", [], "prompt", "empty"),
    ("prompt", ["a", 5], "prompt[1]", "list of token ids"),
    ("prompt", [[1], ["a"]], "prompt[1][0]", "list of token ids"),
    ("prompt", [-1], "prompt[0]", "greater than or equal to 0"),
    ("prompt", [1, 2**31], "prompt[1]", "less than"),
    ("prompt", [1, "a"], "prompt[1]", "list of token ids"),
    ("prompt", [[1], [1, -1]], "prompt[1][1]", "greater than or equal to 0"),
    ("prompt", ["a"] * 129, "prompt", "at most 128 choices"),
    ("echo", 1, "echo", "boolean"),
    ("logprobs", True, "logprobs", "integer"),
    ("best_of", 2, "best_of", "only 1 is"),
    ("suffix", "x", "suffix", "not supported"),
    ("messages", HELLO, "messages", "not a known field"),
]
CHAT_ONLY: list[tuple[str, Any, str, str]] = [
    ("messages", None, "messages", "required"),
    ("messages", [], "messages", "empty"),
    ("messages", "hi", "messages", "list"),
    ("messages", ["hi"], "messages[0]", "object"),
    ("messages", [{"content": "hi"}], "messages[0].role", "required"),
    ("messages", [{"role": "user"}], "messages[0].content", "required"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content", "a string or a list of text parts"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content", "empty"),
    ("messages", [*HELLO, {"role": "tool", "content": "x"}], "messages[1].role", "'system', 'developer', 'user'"),
    ("messages", [{**HELLO[0], "tool_calls": [{}]}], "messages[0].tool_calls", "not supported"),
    ("messages", [{**HELLO[0], "colour": "red"}], "messages[0].colour", "not a known field"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
        "messages[0].content[1].type",
        "'text'",
    ),
    ("logprobs", 1, "logprobs", "boolean"),
    ("top_logprobs", 2, "top_logprobs", "'logprobs' = true"),
    ("max_completion_tokens", "x", "max_completion_tokens", "integer"),
    ("prompt", "hi", "prompt", "not a known field"),
]
TABLE = [
    *((path, *row) for path in (CHAT, COMPLETIONS) for row in BOTH),
    *((COMPLETIONS, *row) for row in COMPLETION_ONLY),
    *((CHAT, *row) for row in CHAT_ONLY),
]


async def test_table_of_bad_fields(router: ScriptedRouter, app_client: httpx.AsyncClient) -> None:
    for path, name, value, param, words in TABLE:
        body = {"model": "fake", **({"messages": HELLO} if path == CHAT else {"prompt": "hi"}), name: value}
        response = await app_client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        case = (path, name, str(value)[:50], response.text)
        assert response.status_code == 400, case
        error = check_shape(response)
        assert error["param"] == param, case
        assert words in error["message"], case
        assert param in error["message"], case
        assert error["type"] == "invalid_request_error", case
        assert len(error["message"]) < 400, case
    assert router.requests == []


PAIRS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1}, "logprobs"),
    (COMPLETIONS, {"prompt": ["a"] * 20, "n": 7}, "n"),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
]


async def test_fields_that_contradict_each_other(router: ScriptedRouter, app_client: httpx.AsyncClient) -> None:
    for path, body, param in PAIRS:
        response = await app_client.post(path, json=body)
        assert response.status_code == 400, body
        assert check_shape(response)["param"] == param
    assert router.requests == []


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b'{"prompt": "hi"} x', "JSON"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "\\ud800"}', "JSON"),
    (b"[" * 5000, "JSON"),
    (b"[]", "object"),
    (b'"hi"', "object"),
    (b"null", "object"),
]


async def test_of_a_key_that_is_repeated_the_last_value_counts(
    router: ScriptedRouter, app_client: httpx.AsyncClient
) -> None:
    await app_client.post(COMPLETIONS, content=b'{"prompt": 5, "prompt": "hi"}')
    assert [request.text for request in router.requests] == ["hi"]


async def test_bodies_that_are_no_json_object(router: ScriptedRouter, app_client: httpx.AsyncClient) -> None:
    for body, words in BAD_BODIES:
        response = await app_client.post(COMPLETIONS, content=body)
        assert response.status_code == 400, body
        assert words in check_shape(response)["message"], body
    assert router.requests == []


async def test_huge_lists_of_bad_values_are_described_by_the_first(app_client: httpx.AsyncClient) -> None:
    for body in ({"prompt": [["a"] * 10_000]}, {"prompt": "a", "stop": [1] * 10_000}):
        response = await app_client.post(COMPLETIONS, json=body)
        assert response.status_code == 400
        assert len(response.content) < 600


@pytest.mark.parametrize(
    ("prompt", "kind", "loc"),
    [
        ("a", "extra_forbidden", ("x0",)),
        (5, "list_type", ("prompt", "<prompts>")),  # a known field's error comes first
        ([[]] * 1000 + [5], "too_many", ("prompt", "<prompts>")),
    ],
)
def test_errors_are_made_of_few_of_many_names_and_prompts(prompt: object, kind: str, loc: tuple[str, ...]) -> None:
    """Pydantic holds the interpreter while it describes each."""
    with pytest.raises(ValidationError) as raised:
        CompletionBody.model_validate({**{f"x{number}": 1 for number in range(1000)}, "prompt": prompt})
    assert raised.value.error_count() <= 2
    first = raised.value.errors()[0]
    assert (first["type"], first["loc"]) == (kind, loc)


async def test_an_error_quotes_no_more_than_a_kilobyte(app_client: httpx.AsyncClient) -> None:
    long = "x" * 50_000
    answers = [
        await app_client.post(COMPLETIONS, json={"prompt": "a", long: 1}),
        await app_client.get(f"/v1/{long}"),
        await app_client.get(f"/v1/models/{long}"),
    ]
    for response in answers:
        message = check_shape(response)["message"]
        assert len(message) <= 1024
        assert message.endswith(("lists those that are", "Not Found", "does not exist"))
        assert len(response.content) < 2048


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json; charset=utf-16"}, 415, "unsupported_media_type"),
        ({"content-type": 'application/json; q=1; CHARSET="latin1"'}, 415, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        ({"x-request-id": "x" * 257}, 400, "invalid_header"),
        ({"x-request-id": "tab\tbed"}, 400, "invalid_header"),
    ],
)
async def test_bad_headers(app_client: httpx.AsyncClient, headers: dict[str, str], status: int, code: str) -> None:
    response = await app_client.post(COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers)
    assert response.status_code == status
    assert check_shape(response)["code"] == code


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", 'application/json;Charset="UTF-8"', None]
)
async def test_good_content_types(app_client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = await app_client.post(COMPLETIONS, content=b'{"prompt": "hi"}', headers=headers)
    assert response.status_code == 200


async def test_unknown_paths_and_methods(app_client: httpx.AsyncClient) -> None:
    for method, path, status, code in [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/fake", 405, "method_not_allowed"),
    ]:
        response = await app_client.request(method, path)
        assert response.status_code == status, path
        assert check_shape(response)["code"] == code
        assert ("allow" in response.headers) == (status == 405)


async def test_a_body_over_the_limit(router: ScriptedRouter, app_client: httpx.AsyncClient) -> None:
    body = json.dumps({"prompt": "x" * BODY_LIMITS.max_bytes}).encode()

    async def chunked() -> AsyncIterator[bytes]:
        yield body

    for content in (body, chunked()):
        response = await app_client.post(COMPLETIONS, content=content)
        assert response.status_code == 413
        assert str(BODY_LIMITS.max_bytes) in check_shape(response)["message"]
    assert router.requests == []


async def test_harmless_fields_are_accepted(router: ScriptedRouter, app_client: httpx.AsyncClient) -> None:
    """What real clients send without asking for anything."""
    common: dict[str, Any] = {
        "model": None, "temperature": None, "stop": None, "logprobs": None, "n": None, "stream_options": None,
        "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"},
        "best_of": 1, "use_beam_search": False, "some_future_field": None,
    }  # fmt: skip
    message: dict[str, Any] = {"role": "user", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    for path, prompt in ((CHAT, {"messages": [message]}), (COMPLETIONS, {"prompt": "hi"})):
        response = await app_client.post(path, json={**common, **prompt})
        assert response.status_code == 200, response.text
    assert [r.model for r in router.requests] == ["", ""]


def test_the_manual_lists_every_field_and_code() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    fields = {name for body in (ChatBody, CompletionBody, StreamOptions, Message) for name in body.model_fields}
    for name in fields | IGNORED | set(NEUTRAL) | set(_CODES.values()):
        assert f"`{name}`" in manual, name


def test_every_kind_of_error_has_a_code_and_a_status() -> None:
    kinds = set(pb.ErrorKind.values()) - {pb.ERROR_KIND_UNSPECIFIED}
    assert set(_CODES) == kinds == set(CODES)
