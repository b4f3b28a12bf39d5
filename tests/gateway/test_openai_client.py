"""The unmodified `openai` client against both endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from gateway.server import HttpServer
from proto import common_pb2 as pb
from proto.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    PodUnavailable,
)
from proto.inference_pb2 import GenerateRequest, GenerateResponse
from tests.gateway.scripted import ScriptedRouter, Step, answer, token

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_chat(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    result = await openai_client.chat.completions.create(model="fake", messages=HELLO)
    assert result.choices[0].message.content == "Hello world"
    assert result.choices[0].message.role == "assistant"
    assert result.choices[0].finish_reason == "stop"
    assert result.id == "chatcmpl-req-1"
    assert result.model == "fake"
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (5, 2, 7)
    assert result.usage.prompt_tokens_details is not None
    assert result.usage.prompt_tokens_details.cached_tokens == 2
    assert [(m.role, m.content) for m in router.requests[0].chat.messages] == [("user", "hi")]


async def test_chat_from_the_synchronous_client(server: HttpServer) -> None:
    def ask() -> str | None:
        with OpenAI(base_url=f"http://{server.address}/v1", api_key="none") as client:
            return client.chat.completions.create(model="fake", messages=HELLO).choices[0].message.content

    assert await asyncio.to_thread(ask) == "Hello world"


async def test_chat_streamed(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].delta.content for c in chunks] == ["", "Hello", " world", None]
    assert [c.choices[0].delta.role for c in chunks] == ["assistant", None, None, None]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert {c.id for c in chunks} == {"chatcmpl-req-1"}
    assert all(c.usage is None for c in chunks)


async def test_chat_streamed_through_the_accumulating_helper(openai_client: AsyncOpenAI) -> None:
    async with openai_client.chat.completions.stream(model="fake", messages=HELLO) as stream:
        async for _ in stream:
            pass
        result = await stream.get_final_completion()
    assert result.choices[0].message.content == "Hello world"
    assert result.choices[0].finish_reason == "stop"


async def test_stream_with_usage_in_its_last_chunk(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 2)


async def test_stream_with_usage_in_every_chunk(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(
        model="fake",
        prompt="hi",
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},  # vLLM's
    )
    usages = [chunk.usage async for chunk in stream]
    assert [(u.prompt_tokens, u.completion_tokens) for u in usages if u] == [(5, 1), (5, 2), (5, 2), (5, 2)]


async def test_completion(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.play(*answer("a", "b", finish=pb.FINISH_REASON_LENGTH))
    result = await openai_client.completions.create(model="fake", prompt="hi", max_tokens=2, stop=["x", "y"], seed=-1)
    assert result.choices[0].text == "ab"
    assert result.choices[0].finish_reason == "length"
    assert result.id == "cmpl-req-1"
    sampling = router.requests[0].sampling
    assert (sampling.max_tokens, list(sampling.stop), sampling.seed) == (2, ["x", "y"], 2**64 - 1)


async def test_completion_streamed(openai_client: AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(model="fake", prompt="hi", stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [(c.text, c.finish_reason) for c in chunks] == [("Hello", None), (" world", None), ("", "stop")]


def by_seed(request: GenerateRequest) -> list[Step]:
    seed = request.sampling.seed
    return answer(f"seed {seed}", request_id=f"req-{seed}", cached_tokens=seed - 10)


async def test_n_choices_draw_with_seeds_in_a_row(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.script = by_seed
    result = await openai_client.chat.completions.create(model="fake", messages=HELLO, n=3, seed=10)
    assert [(c.index, c.message.content) for c in result.choices] == [(0, "seed 10"), (1, "seed 11"), (2, "seed 12")]
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 3)
    assert result.usage.prompt_tokens_details is not None
    assert result.usage.prompt_tokens_details.cached_tokens == 0


async def test_n_choices_streamed(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.script = by_seed
    stream = await openai_client.chat.completions.create(model="fake", messages=HELLO, n=2, seed=10, stream=True)
    texts, finished, ids = {0: "", 1: ""}, [], set()
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
        ids.add(chunk.id)
    assert texts == {0: "seed 10", 1: "seed 11"}
    assert sorted(finished) == [0, 1]
    assert len(ids) == 1


async def test_list_of_prompts(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.script = lambda request: answer(f"<{request.text}>", prompt_tokens=len(request.text))
    result = await openai_client.completions.create(model="fake", prompt=["a", "bb"], n=2)
    assert [c.text for c in result.choices] == ["<a>", "<a>", "<bb>", "<bb>"]
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize(
    ("prompt", "ids"), [([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]])], ids=["one", "several"]
)
async def test_prompts_of_token_ids(
    router: ScriptedRouter, openai_client: AsyncOpenAI, prompt: list[int], ids: list[list[int]]
) -> None:
    await openai_client.completions.create(model="fake", prompt=prompt)
    assert sorted(list(r.tokens.token_ids) for r in router.requests) == ids


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_of_a_text_prompt(openai_client: AsyncOpenAI, stream: bool) -> None:
    result = await openai_client.completions.create(model="fake", prompt="Say: ", echo=True, stream=stream)
    texts = (
        [c.choices[0].text async for c in result]
        if isinstance(result, openai.AsyncStream)
        else [result.choices[0].text]
    )
    assert "".join(texts) == "Say: Hello world"


async def test_echo_of_a_token_prompt_comes_from_the_router(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    first, *rest = answer("a", "b")
    assert isinstance(first, GenerateResponse)
    first.prompt_text = "Say: "
    router.play(first, *rest)
    result = await openai_client.completions.create(model="fake", prompt=[1, 2], echo=True)
    assert result.choices[0].text == "Say: ab"
    assert router.requests[0].echo_prompt


def with_logprobs(request: GenerateRequest) -> list[Step]:
    assert request.sampling.logprobs == 2
    steps = answer("é", "x", "!")
    tokens = [
        pb.TokenOutput(
            logprob=-0.5, text="\ufffd", raw=b"\xc3", top_logprobs=[pb.TopLogprob(text="e", raw=b"e", logprob=-1)]
        ),
        pb.TokenOutput(
            logprob=float("-inf"),
            text="\ufffd",
            raw=b"\xa9",
            top_logprobs=[pb.TopLogprob(text="z", raw=b"z", logprob=float("nan"))],
        ),
        token("x", logprob=-0.25, top={"x": -0.25, "y": -2.0}),
    ]
    for step, output in zip(steps, tokens, strict=True):
        assert isinstance(step, GenerateResponse)
        step.tokens[0].CopyFrom(output)
    return steps


async def test_chat_logprobs(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.script = with_logprobs
    result = await openai_client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=2)
    assert result.choices[0].logprobs is not None
    content = result.choices[0].logprobs.content
    assert content is not None
    assert [(c.token, c.bytes, c.logprob) for c in content] == [
        ("\ufffd", [0xC3], -0.5),
        ("\ufffd", [0xA9], -9999.0),
        ("x", [0x78], -0.25),
    ]
    assert [(t.token, t.bytes, t.logprob) for t in content[2].top_logprobs] == [("x", [120], -0.25), ("y", [121], -2.0)]


async def test_completion_logprobs_streamed_and_whole_agree(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.script = with_logprobs
    result = await openai_client.completions.create(model="fake", prompt="hi", logprobs=2)
    whole = result.choices[0].logprobs
    assert whole is not None
    assert whole.tokens == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert whole.token_logprobs == [-0.5, -9999.0, -0.25]
    assert whole.top_logprobs == [
        {"e": -1.0, "bytes:\\xc3": -0.5},
        {"z": -9999.0, "bytes:\\xa9": -9999.0},
        {"x": -0.25, "y": -2.0},
    ]
    assert whole.text_offset == [0, 0, 1]
    stream = await openai_client.completions.create(model="fake", prompt="hi", logprobs=2, stream=True)
    parts = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
    assert [t for part in parts for t in part.tokens or []] == whole.tokens
    assert [o for part in parts for o in part.text_offset or []] == whole.text_offset


async def test_models(openai_client: AsyncOpenAI) -> None:
    models = await openai_client.models.list()
    assert [(m.id, m.created, m.owned_by) for m in models.data] == [("fake", 1_700_000_000, "pdserve")]
    assert (await openai_client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        await openai_client.models.retrieve("some/other")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


LIMIT = "max_completion_tokens"
BAD = "invalid_value"
ERRORS: list[tuple[PdserveError, type[openai.APIStatusError], int, str | None, str]] = [
    (InvalidRequest("bad", field="sampling.top_p"), openai.BadRequestError, 400, "top_p", BAD),
    (InvalidRequest("too long", field="chat"), openai.BadRequestError, 400, "messages", BAD),
    (InvalidRequest("sampling.max_tokens 0", field="sampling.max_tokens"), openai.BadRequestError, 400, LIMIT, BAD),
    (NotFound("no such model", field="model"), openai.NotFoundError, 404, "model", "model_not_found"),
    (Overloaded("later"), openai.RateLimitError, 429, None, "rate_limit_exceeded"),
    (PodUnavailable("no pod"), openai.InternalServerError, 503, None, "pod_unavailable"),
    (DeadlineExceeded("late"), openai.InternalServerError, 504, None, "deadline_exceeded"),
    (InternalError("bug"), openai.InternalServerError, 500, None, "internal_error"),
    (Cancelled("aborted"), openai.APIStatusError, 499, None, "request_cancelled"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token(router: ScriptedRouter, openai_client: AsyncOpenAI, stream: bool) -> None:
    for error, expected, *rest in ERRORS:
        router.play(error)
        with pytest.raises(expected) as caught:
            await openai_client.chat.completions.create(
                model="fake", messages=HELLO, stream=stream, max_completion_tokens=9
            )
        assert [caught.value.status_code, caught.value.param, caught.value.code] == rest
        assert error.message.removeprefix("sampling.max_tokens") in caught.value.message
        assert "sampling" not in caught.value.message


async def test_overload_says_when_to_try_again(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.play(Overloaded("later", retry_after_ms=1500))
    with pytest.raises(openai.RateLimitError) as caught:
        await openai_client.chat.completions.create(model="fake", messages=HELLO)
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")


async def test_error_after_the_first_token_reaches_a_streaming_client(
    router: ScriptedRouter, openai_client: AsyncOpenAI
) -> None:
    router.play(answer("Hello", "never")[0], PodUnavailable("the last decode pod is gone"))
    stream = await openai_client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    finish_reasons = []

    async def read() -> None:
        async for chunk in stream:
            finish_reasons.append(chunk.choices[0].finish_reason)

    with pytest.raises(openai.APIError, match="the last decode pod is gone"):
        await read()
    assert finish_reasons == [None, None]


async def test_error_of_one_choice_fails_all_and_cancels_the_others(
    router: ScriptedRouter, openai_client: AsyncOpenAI
) -> None:
    hang = asyncio.Event()
    scripts: dict[int, Callable[[], list[Step]]] = {0: lambda: [hang], 1: lambda: [Overloaded("full")]}
    router.script = lambda request: scripts[request.sampling.seed]()
    with pytest.raises(openai.RateLimitError):
        await openai_client.completions.create(model="fake", prompt="hi", n=2, seed=0)
    assert (await asyncio.wait_for(router.cancelled.get(), 5)).sampling.seed == 0


async def test_answer_that_never_finishes_is_an_error(router: ScriptedRouter, openai_client: AsyncOpenAI) -> None:
    router.play(*answer("Hello", "never")[:1])
    with pytest.raises(openai.InternalServerError):
        await openai_client.completions.create(model="fake", prompt="hi")
