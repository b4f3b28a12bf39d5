"""The whole system on the real model, as its user starts it: answers equal transformers', whatever happens to pods.

Every process is real: registry, router, gateway, prefill and decode pods, on loopback.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionUserMessageParam

from proto import inference_pb2 as pb
from router.client import RouterClient
from tests.reference_outputs import CASE_NAMES, ReferenceCase, reference_case
from tests.support.polling import until
from tests.support.stack import LaunchedStack, launched_stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

LEDGER_TOLERANCE_S = 1e-3
FLOAT32 = ("--dtype", "float32", "--kv-memory", "512MiB")
SHORT_CASES = ("english question", "chinese list", "code", "emoji", "1 tokens", "16 tokens", "33 tokens")
STORY: list[ChatCompletionUserMessageParam] = [
    {"role": "user", "content": "Write a long story about a lighthouse keeper who finds a message in a bottle."}
]


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    usage: pb.Usage
    ledger: pb.Ledger


async def generate(router: RouterClient, case: ReferenceCase) -> Answer:
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=case.prompt_ids))
    request.sampling.temperature = 0
    request.sampling.ignore_eos = True
    request.sampling.max_tokens = len(case.output_ids)
    responses = [response async for response in router.generate(request)]
    tokens = tuple(token.token_id for response in responses for token in response.tokens)
    return Answer(tokens, responses[-1].usage, responses[-1].ledger)


def check(case: ReferenceCase, answer: Answer, *, prefill_pod: bool) -> None:
    assert answer.token_ids == case.output_ids, case.name
    assert answer.usage.prompt_tokens == len(case.prompt_ids)
    assert answer.usage.completion_tokens == len(case.output_ids)
    assert answer.usage.cached_tokens <= len(case.prompt_ids)
    total = sum(entry.seconds for entry in answer.ledger.entries)
    assert abs(total - answer.ledger.wall_s) <= LEDGER_TOLERANCE_S, answer.ledger
    assert all(entry.seconds >= 0 for entry in answer.ledger.entries), answer.ledger
    assert [bool(attempt.prefill_pod) for attempt in answer.ledger.attempts] == [prefill_pod]
    assert (answer.ledger.transfer_bytes > 0) <= prefill_pod


async def answers(router: RouterClient, cases: Sequence[ReferenceCase]) -> list[Answer]:
    """All at once, so that batches mix prompts and decodes of every length."""
    return await asyncio.gather(*(generate(router, case) for case in cases))


@pytest.fixture(scope="module")
def cases() -> list[ReferenceCase]:
    return [reference_case(name) for name in CASE_NAMES]


@pytest.fixture(scope="module")
def stack(cases: list[ReferenceCase]) -> Iterator[LaunchedStack]:
    """Disaggregated. `cases` comes first: computing it for the first time would compete for the cores."""
    with launched_stack(*FLOAT32, "--prefill", "1", "--decode", "1") as stack:
        yield stack


async def test_disaggregated_answers_equal_transformers(stack: LaunchedStack, cases: list[ReferenceCase]) -> None:
    async with RouterClient(stack.router_address) as router:
        for case, answer in zip(cases, await answers(router, cases), strict=True):
            check(case, answer, prefill_pod=True)
    await stack.idle()


async def test_prefix_hits_on_both_pods_change_nothing(stack: LaunchedStack) -> None:
    cases = [reference_case(name) for name in SHORT_CASES]
    async with RouterClient(stack.router_address) as router:
        for case in cases:
            check(case, await generate(router, case), prefill_pod=True)
            again = await generate(router, case)
            assert again.token_ids == case.output_ids
            assert again.usage.cached_tokens >= (len(case.prompt_ids) - 1) // 16 * 16
    await stack.idle()


async def test_openai_client_streams_the_same_text_as_it_gets_whole(stack: LaunchedStack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.http_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        whole = await client.chat.completions.create(model=model, messages=STORY, max_tokens=24, temperature=0)
        stream = await client.chat.completions.create(
            model=model, messages=STORY, max_tokens=24, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == whole.choices[0].message.content
        assert len([part for part in parts if part]) > 12, "it came in one piece"
        text = await client.completions.create(
            model=model, prompt="The capital of France is", max_tokens=8, extra_body={"ignore_eos": True}
        )
        assert text.usage is not None
        assert text.usage.completion_tokens == 8


@pytest.mark.parametrize("num_chunks", [1, 5], ids=["at the first token", "decoding"])
async def test_client_that_leaves_mid_stream_costs_nothing(stack: LaunchedStack, num_chunks: int) -> None:
    async with openai.AsyncOpenAI(base_url=stack.http_url, api_key="none") as client:
        stream = await long_completion(client, f"{num_chunks} chunks")
        for _ in range(num_chunks):
            await anext(aiter(stream))
        await stream.close()
    await stack.idle()


async def test_client_that_leaves_while_its_prompt_is_computed_costs_nothing(stack: LaunchedStack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.http_url, api_key="none") as client:
        call = asyncio.create_task(long_completion(client, "while it is computed"))

        async def is_prefilling() -> bool:
            return await stack.gauge("prefill-0", "sequences_running") > 0

        await until(is_prefilling, 30.0)
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
    await stack.idle()


async def long_completion(client: openai.AsyncOpenAI, unique: str) -> openai.AsyncStream[Completion]:
    """A prompt that takes a while, and no prefix of which is cached."""
    model = (await client.models.list()).data[0].id
    prompt = unique + " lighthouse" * 1200
    return await client.completions.create(model=model, prompt=prompt, max_tokens=500, stream=True)


async def test_neither_a_killed_decode_pod_nor_drafts_change_the_story(stack: LaunchedStack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.http_url, api_key="none") as client:
        plain = await story(client)
    with launched_stack(*FLOAT32, "--prefill", "1", "--decode", "2", "--speculation", "ngram") as drafting:
        async with openai.AsyncOpenAI(base_url=drafting.http_url, api_key="none") as client:
            assert await story(client) == plain
            assert await story(client, after_20=lambda: kill_the_busy_decode_pod(drafting)) == plain
        async with RouterClient(drafting.router_address) as router:
            ledger = await router.timeline()
    assert ledger.num_drafts > 0
    assert [bool(attempt.failure) for attempt in ledger.attempts] == [True, False]
    assert abs(sum(entry.seconds for entry in ledger.entries) - ledger.wall_s) <= LEDGER_TOLERANCE_S


async def story(client: openai.AsyncOpenAI, after_20: Callable[[], Awaitable[None]] | None = None) -> str:
    """96 sampled tokens, drawn with a seed; `after_20` chunks something happens."""
    model = (await client.models.list()).data[0].id
    stream = await client.chat.completions.create(
        model=model, messages=STORY, max_tokens=96, temperature=0.8, seed=3, stream=True
    )
    parts: list[str] = []
    async for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        if len(parts) == 20 and after_20 is not None:
            await after_20()
    return "".join(parts)


async def kill_the_busy_decode_pod(stack: LaunchedStack) -> None:
    for pod in ("decode-0", "decode-1"):
        if await stack.gauge(pod, "sequences_running"):
            stack.pod_process(pod).send_signal(signal.SIGKILL)
            return
    raise AssertionError("no decode pod runs the request")


async def test_colocated_answers_with_drafts_equal_transformers(cases: list[ReferenceCase]) -> None:
    chosen = [case for case in cases if len(case.prompt_ids) < 100]
    with launched_stack(*FLOAT32, "--colocated", "--speculation", "ngram") as stack:
        async with RouterClient(stack.router_address) as router:
            for case, answer in zip(chosen, await answers(router, chosen), strict=True):
                check(case, answer, prefill_pod=False)
        await stack.idle()
