"""A router on in-process fake pods: what the end-to-end tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.fake import EOS_ID, FakeAnswer, fake_generate
from engine.sequence import SamplingParams
from proto import common_pb2, inference_pb2
from proto.errors import PdserveError
from router.client import Client, RouterClient
from router.lifecycle import Event, State
from router.request import Request
from router.server import Router
from router.settings import RouterSettings
from router.snapshot import PodView
from tests.support.cluster import Cluster, running_cluster

WAIT_S = 30.0
SLOW_STEPS: dict[str, object] = {"fake_step_s": 0.003}  # of pods, so that there is time for a fault


@dataclass
class Outcome:
    """All that a client saw of one request."""

    responses: list[inference_pb2.GenerateResponse] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [t.token_id for r in self.responses for t in r.tokens]

    @property
    def last(self) -> inference_pb2.GenerateResponse:
        return self.responses[-1]

    @property
    def ledger(self) -> inference_pb2.Ledger:
        return self.last.ledger


def tokens_request(prompt: Sequence[int], **sampling: Any) -> inference_pb2.GenerateRequest:
    """Greedy, 16 tokens unless `sampling` says otherwise."""
    params = common_pb2.SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | sampling))
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=prompt), sampling=params)


def right_answer(request: inference_pb2.GenerateRequest) -> FakeAnswer:
    """By the fake model's own generator, which knows no pods and no cache. For greedy token prompts."""
    sampling = request.sampling
    params = SamplingParams(
        temperature=sampling.temperature,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset({EOS_ID, *sampling.stop_token_ids}),
    )
    return fake_generate(tuple(request.tokens.token_ids), params)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def long_running(num_prompt: int, num_output: int, seed: int = 0) -> inference_pb2.GenerateRequest:
    """A request whose answer has exactly `num_output` tokens."""
    return tokens_request(prompt_of(num_prompt, seed), max_tokens=num_output, min_tokens=num_output)


@dataclass
class Stack:
    """Pods, one router and a client of it."""

    pods: Cluster
    router: Router
    client: RouterClient

    async def generate(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> Outcome:
        outcome = Outcome()
        async with asyncio.timeout(WAIT_S):
            async for response in self.client.generate(request, timeout_s):
                outcome.responses.append(response)
        return outcome

    def sees(self, condition: Callable[[list[PodView]], bool]) -> Callable[[], bool]:
        return lambda: condition([pod for pod in self.router.cluster.snapshot() if pod.reachable])

    async def until_pods(self, num_pods: int) -> None:
        """The router can talk to so many pods."""
        await until(self.sees(lambda pods: len(pods) == num_pods))

    async def until_rest(self) -> None:
        """No request, and nothing left to tell pods."""
        await until(lambda: len(self.router.requests) == 0 and len(self.router.cluster.background) == 0)
        self.router.check_invariants()


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Polls what nothing announces."""
    async with asyncio.timeout(wait_s):
        while not condition():  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.002)


def router_settings(pods: Cluster, **overrides: object) -> RouterSettings:
    values: dict[str, object] = {
        "port": 0,
        "cluster": pods.name,
        "registry_url": pods.registry_url,
        "model": "fake",
        "stop_grace_s": 0.0,
    }
    return RouterSettings.model_validate(values | overrides)


@asynccontextmanager
async def running_router(pods: Cluster, **overrides: object) -> AsyncIterator[Stack]:
    """At the end, the router must have come to rest by itself."""
    router = Router(router_settings(pods, **overrides), Random(1))
    await router.start()
    try:
        async with RouterClient(router.address) as client:
            stack = Stack(pods, router, client)
            yield stack
            await stack.until_rest()
    finally:
        await router.stop()


@asynccontextmanager
async def running_stack(
    registry_url: str,
    runtime_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    pod: dict[str, object] | None = None,
    **overrides: object,
) -> AsyncIterator[Stack]:
    """Pods with `pod` settings, and a router with `overrides` that can talk to all of them."""
    async with running_cluster(registry_url, runtime_dir) as pods:
        for role, count in (("prefill", prefill), ("decode", decode)):
            for _ in range(count):
                await pods.start(role, **(pod or {}))
        async with running_router(pods, **overrides) as stack:
            await stack.until_pods(prefill + decode)
            yield stack


def on_entering(monkeypatch: pytest.MonkeyPatch, state: State, act: Callable[[Request], object]) -> None:
    """Calls `act` in the moment in which a request enters `state` for the first time."""
    original, entered = Request._move, asyncio.Event()

    def move(self: Request, event: Event) -> None:
        original(self, event)
        if self.state is state and not entered.is_set():
            entered.set()
            act(self)

    monkeypatch.setattr(Request, "_move", move)


async def collect(client: Client, request: inference_pb2.GenerateRequest, timeout_s: float | None = None) -> Outcome:
    outcome = Outcome()
    async with asyncio.timeout(WAIT_S):
        async for response in client.generate(request, timeout_s):
            outcome.responses.append(response)
    return outcome


async def failure(client: Client, request: inference_pb2.GenerateRequest) -> PdserveError:
    with pytest.raises(PdserveError) as raised:
        await collect(client, request)
    return raised.value


async def first_response(client: Client, request: inference_pb2.GenerateRequest) -> asyncio.Task[Outcome]:
    """The request's task, once it has a response."""
    outcome, started = Outcome(), asyncio.Event()

    async def run() -> Outcome:
        async for response in client.generate(request):
            outcome.responses.append(response)
            started.set()
        return outcome

    task = asyncio.create_task(run())
    await asyncio.wait([task, asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED)
    return task


async def live_ids(stack: Stack, num_requests: int) -> list[str]:
    await until(lambda: len(stack.router.requests) == num_requests)
    return [request.id for request, _ in stack.router.requests.live()]
