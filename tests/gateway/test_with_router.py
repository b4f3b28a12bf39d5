"""Against a real router and pods on the fake engine, whose answers can be computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from engine.fake import fake_generate
from engine.sequence import SamplingParams
from gateway.server import HttpServer
from router.gateway_client import GatewayClient
from router.local_client import LocalClient
from router.server import Router
from router.settings import RouterSettings
from tests.gateway.conftest import serving
from tests.gateway.test_disconnect import LIMIT_S, RawClient
from tests.support.cluster import Cluster, assert_idle, running_cluster
from tests.support.polling import until

TOGETHER, APART = "together", "apart"


@pytest.fixture
def fake_step_s() -> float:
    """How long a decode step takes; tests override it by parametrizing."""
    return 0.0


@pytest.fixture
async def cluster(registry_url: str, tmp_path: Path, fake_step_s: float) -> AsyncIterator[Cluster]:
    async with running_cluster(registry_url, tmp_path) as cluster:
        await cluster.start("prefill")
        await cluster.start("decode", fake_step_s=fake_step_s)
        yield cluster


@pytest.fixture
async def router(cluster: Cluster) -> AsyncIterator[Router]:
    values = {"model": "fake", "cluster": cluster.name, "registry_url": cluster.registry_url, "port": 0}
    router = Router(RouterSettings.model_validate(values))
    await router.start()
    yield router
    router.check_invariants()
    await router.stop()


@asynccontextmanager
async def gateway_of(router: Router, how: str) -> AsyncIterator[HttpServer]:
    """`how`: whether the router could be in another process."""
    connected = LocalClient(router.inference) if how == TOGETHER else GatewayClient(router.address)
    async with connected as client, serving(client) as server:
        async with asyncio.timeout(LIMIT_S):
            while await client.why_not_serving() is not None:  # noqa: ASYNC110 - what a load balancer does
                await asyncio.sleep(0.01)
        yield server


@pytest.fixture(params=[TOGETHER, APART])
async def server(router: Router, request: pytest.FixtureRequest) -> AsyncIterator[HttpServer]:
    async with gateway_of(router, request.param) as server:
        yield server


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected_text(prompt: str, max_tokens: int) -> str:
    """Greedy, by the fake model's rule: ids below 256 are bytes, others read <id>."""
    ids = fake_generate(list(prompt.encode()), SamplingParams(temperature=0, max_tokens=max_tokens)).output_ids
    return b"".join(bytes([i]) if i < 256 else f"<{i}>".encode() for i in ids).decode(errors="replace")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_completion(client: AsyncOpenAI, stream: bool) -> None:
    result = await client.completions.create(
        model="fake", prompt="hello", max_tokens=20, temperature=0, stream=stream, extra_body={"ignore_eos": True}
    )
    parts = [part async for part in result] if isinstance(result, openai.AsyncStream) else [result]
    assert "".join(part.choices[0].text for part in parts) == expected_text("hello", 20)
    assert parts[-1].choices[0].finish_reason == "length"


async def test_chat_with_usage_and_its_timeline(client: AsyncOpenAI, server: HttpServer) -> None:
    result = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
    )
    prompt = "user: hello\nassistant: "
    assert result.choices[0].message.content == expected_text(prompt, 8)
    assert result.usage is not None
    assert result.usage.prompt_tokens == len(prompt)
    assert 1 <= result.usage.completion_tokens <= 8
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as http:
        ledger = (await http.get(f"/v1/requests/{result.id}/timeline")).json()
    assert result.id == f"chatcmpl-{ledger['request_id']}"
    assert sum(entry["seconds"] for entry in ledger["entries"]) == pytest.approx(ledger["wall_s"], abs=1e-3)


async def test_interim_usage_counts_up_to_the_final_one(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="fake",
        prompt="hello",
        max_tokens=5,
        temperature=0,
        stream=True,
        extra_body={
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )
    usages = [chunk.usage async for chunk in stream]
    assert all(usage is not None and usage.prompt_tokens == 5 for usage in usages)
    counts = [usage.completion_tokens for usage in usages if usage]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_echo_of_token_ids(client: AsyncOpenAI) -> None:
    result = await client.completions.create(
        model="fake", prompt=list(b"hello"), max_tokens=4, temperature=0, echo=True, extra_body={"ignore_eos": True}
    )
    assert result.choices[0].text == "hello" + expected_text("hello", 4)


async def test_logprobs_of_both_endpoints(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert chat.usage is not None
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or ()) == chat.usage.completion_tokens
    completion = await client.completions.create(model="fake", prompt="hi", max_tokens=3, logprobs=2)
    assert completion.usage is not None
    assert completion.choices[0].logprobs is not None
    assert len(completion.choices[0].logprobs.tokens or ()) == completion.usage.completion_tokens


async def test_choices_with_seeds_in_a_row_equal_those_asked_for_alone(client: AsyncOpenAI) -> None:
    extra = {"ignore_eos": True}
    together = await client.completions.create(model="fake", prompt="hi", max_tokens=6, n=3, seed=5, extra_body=extra)
    alone = [
        await client.completions.create(model="fake", prompt="hi", max_tokens=6, seed=seed, extra_body=extra)
        for seed in (5, 6, 7)
    ]
    assert [c.text for c in together.choices] == [result.choices[0].text for result in alone]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [2, 600]]}, "prompt[1][1]"),
    ({"prompt": ["ok", ""], "n": 2}, "prompt[1]"),
    ({"prompt": ["b", "a" * 5000]}, "prompt[1]"),
    ({"prompt": [1, 512]}, "prompt[1]"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop_token_ids": [512]}, "stop_token_ids[0]"),
    ({"stop": ""}, "stop[0]"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"min_tokens": 17}, "min_tokens"),
]


async def test_what_the_router_refuses_names_the_clients_field(server: HttpServer) -> None:
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as http:
        for fields, param in REFUSED:
            for stream in (False, True):
                response = await http.post("/v1/completions", json={"prompt": "hi", "stream": stream, **fields})
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert error["param"] == param, (fields, error)
                assert error["message"].startswith(param), (fields, error)
        response = await http.post("/v1/completions", json={"prompt": "hi", "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_errors_are_the_same_together_and_apart(router: Router) -> None:
    """To the byte, but for when to try again."""
    others: list[dict[str, object]] = [{"prompt": "x" * 2**20}, {"model": "other"}, {"nope": 1}]
    bodies = [{"prompt": "hi", **fields} for fields in [*(fields for fields, _ in REFUSED), *others]]
    async with gateway_of(router, TOGETHER) as together, gateway_of(router, APART) as apart:
        for body in bodies:
            for stream in (False, True):
                asked = body | {"stream": stream}
                assert await error_of(together, asked) == await error_of(apart, asked)
        for path in ("/v1/models", "/v1/models/nope", "/v1/requests/nope/timeline", "/health"):
            assert await page_of(together, path) == await page_of(apart, path)


async def error_of(server: HttpServer, body: dict[str, object]) -> tuple[int, bytes]:
    async with httpx.AsyncClient(base_url=f"http://{server.address}", verify=False) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code >= 400, body
    return response.status_code, response.content


async def page_of(server: HttpServer, path: str) -> tuple[int, bytes]:
    async with httpx.AsyncClient(base_url=f"http://{server.address}", verify=False) as http:
        response = await http.get(path)
    return response.status_code, response.content


async def test_a_client_that_does_not_read_holds_up_nobody(
    router: Router, cluster: Cluster, server: HttpServer
) -> None:
    """Its answer, of more bytes than sockets take, is computed to its end, and waits."""
    slow = await RawClient.connect(server)
    body = {"prompt": "hi", "max_tokens": 1000, "n": 4, "logprobs": 20, "ignore_eos": True}
    slow.send("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    await slow.read_until(b"data: ")
    await until(lambda: len(router.requests) == 0)
    for pod in cluster.pods:
        await assert_idle(pod)
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as http:
        assert (await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})).status_code == 200
    assert server.server_state.tasks, "the answer is not written yet"
    received = bytearray()
    async with asyncio.timeout(LIMIT_S):
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += await slow.reader.read(2**20)
    assert received.count(b'"finish_reason":"length"') == 4
    assert b'"completion_tokens":4000' in received
    await slow.leave()


@pytest.mark.parametrize("fake_step_s", [0.05])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_disconnect_frees_everything_on_both_pods(
    cluster: Cluster, router: Router, server: HttpServer, stream: bool
) -> None:
    raw = await RawClient.connect(server)
    raw.send("/v1/completions", {"prompt": "hi", "max_tokens": 500, "stream": stream, "ignore_eos": True})
    await until(lambda: cluster.pods[1].load().num_running > 0)
    await raw.leave()
    await until(lambda: len(router.requests) == 0)
    for pod in cluster.pods:
        await assert_idle(pod)
