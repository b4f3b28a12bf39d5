"""Failure classes of docs/failures.md that only the whole system shows: pods in this process, or killed for real."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from decode_service.servicer import DecodeService
from pdserve.paths import ROOT
from pod.pod import Pod
from proto import inference_pb2 as pb
from proto.errors import Overloaded, PodUnavailable
from router import token_stream
from router.client import RouterClient
from router.lifecycle import State
from router.request import Request
from tests.router.support import Outcome, Stack, long_running, on_entering, prompt_of, running_stack, tokens_request
from tests.router.test_end_to_end import assert_right
from tests.support.cluster import tokens_of
from tests.support.polling import until
from tests.support.registry import RegistryServer
from tests.system.chaos_stack import ChaosStack, running

SLOW: dict[str, object] = {"fake_step_s": 0.003}


def decode_pod_of(stack: Stack, request: Request) -> Pod:
    """Where the present attempt decodes or is going to."""
    assert request._attempt is not None, "it was placed"
    name = request._attempt.placement.decode.pod.pod_id
    return next(pod for pod in stack.pods.pods if pod.plan.pod_id == name)


@pytest.mark.parametrize(
    "state", [State.RESERVING, State.PREFILLING, State.HANDING_OFF, State.TRANSFERRING, State.STARTING]
)
async def test_12_a_decode_pod_dies_before_its_first_token(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    prefill = 0 if state is State.STARTING else 1
    async with running_stack(registry_url, tmp_path, prefill=prefill, decode=2, pod=SLOW) as stack:
        kills: list[asyncio.Task[None]] = []

        def kill(request: Request) -> None:
            kills.append(asyncio.create_task(stack.pods.kill(decode_pod_of(stack, request))))

        on_entering(monkeypatch, state, kill)
        request = long_running(60, 20)
        assert_right(await stack.generate(request), request)
        await asyncio.gather(*kills)
        assert len(kills) == 1
        await stack.pods.assert_idle()


async def test_12_a_decode_pod_dies_with_one_token_to_go(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, decode=2, pod={"fake_step_s": 0.02}) as stack:
        request, outcome = long_running(50, 30), Outcome()
        kill: asyncio.Task[None] | None = None
        async for response in stack.client.generate(request):
            outcome.responses.append(response)
            if kill is None and len(outcome.token_ids) >= 29:
                ((served, _),) = stack.router.requests.live()
                kill = asyncio.create_task(stack.pods.kill(decode_pod_of(stack, served)))
        assert kill is not None
        await kill
        assert_right(outcome, request)


async def test_12_a_killed_router_ends_streams_with_an_error_and_pods_come_to_rest() -> None:
    async with running(num_prefill=1, num_decode=1, pod={"num_blocks": 64, "fake_step_s": 0.005}) as stack:
        request, outcome = long_running(100, 800), Outcome()
        with pytest.raises(PodUnavailable):
            await generate_and_kill(stack, request, outcome)
        assert not any(response.finish_reason for response in outcome.responses)
        await stack.routers[0].kill()
        await stack.routers[0].start()
        async with RouterClient(stack.routers[0].ready["address"]) as client:
            again = Outcome([response async for response in client.generate(long_running(100, 20))])
        assert_right(again, long_running(100, 20))
        assert await stack.idle_problems() + await stack.stop() == []


async def generate_and_kill(stack: ChaosStack, request: pb.GenerateRequest, outcome: Outcome) -> None:
    """The router is killed after five responses."""
    async with RouterClient(stack.routers[0].ready["address"]) as client:
        async for response in client.generate(request):
            outcome.responses.append(response)
            if len(outcome.responses) == 5:
                stack.routers[0].send(signal.SIGKILL)


async def test_14_a_pod_given_up_wrongly_is_taken_back_with_all_that_runs_on_it(
    registry_url: str, tmp_path: Path
) -> None:
    """Its beats were late, its token stream was not."""
    async with running_stack(registry_url, tmp_path, pod=SLOW) as stack:
        cluster, request = stack.router.cluster, long_running(20, 200)
        answer = asyncio.create_task(stack.generate(request))
        await until(lambda: stack.router.requests.states() == ["decoding"])
        cluster._watcher.pods.sightings.clear()
        cluster._updated()
        assert cluster.why_not_serving(stack.router.services.model)
        await until(lambda: cluster.why_not_serving(stack.router.services.model) is None)
        outcome = await answer
        assert_right(outcome, request)
        assert len(outcome.ledger.attempts) == 1


async def test_14_a_router_that_stood_still_does_not_blame_its_pods(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did not hear in that time is no silence of theirs."""
    monkeypatch.setattr(token_stream, "SILENCE_S", 1.2)  # more than two beats
    async with running_stack(registry_url, tmp_path, pod=SLOW) as stack:
        request = long_running(20, 200)
        answer = asyncio.create_task(stack.generate(request))
        await until(lambda: stack.router.requests.states() == ["decoding"])
        time.sleep(1.4)  # noqa: ASYNC251  # the fault itself: nothing in this process runs, but for the engines' threads
        outcome = await answer
        assert_right(outcome, request)
        assert len(outcome.ledger.attempts) == 1


@pytest.mark.parametrize("prefill", [0, 1])
async def test_14_a_stream_that_only_the_router_believes_in_is_opened_again(
    registry_url: str, tmp_path: Path, prefill: int
) -> None:
    """The pod has cut off a router that stood still, and the router has a backlog to read before it sees the end."""
    async with running_stack(registry_url, tmp_path, prefill=prefill) as stack:
        tokens_of(stack.pods.pods[-1]).streams.clear()
        request = long_running(20, 20)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert [bool(attempt.failure) for attempt in outcome.ledger.attempts] == [True, False]


async def test_17_the_only_decode_pod_drains_before_its_successor_is_there(registry_url: str, tmp_path: Path) -> None:
    """It refuses at once, and the router does not know why yet: that must not cost a request all its attempts."""
    async with running_stack(registry_url, tmp_path, prefill=0) as stack:
        (leaving,) = stack.pods.pods
        leaving.role.begin_drain()
        request = long_running(20, 20)
        answer = asyncio.create_task(stack.generate(request))
        await until(lambda: any(served.ledger().attempts for served, _ in stack.router.requests.live()))
        await stack.pods.start("decode")
        outcome = await answer
        assert_right(outcome, request)
        assert outcome.ledger.attempts[-1].decode_pod != leaving.plan.pod_id


async def test_24_a_pod_that_was_full_is_asked_again_without_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time alone makes it eligible again: no poll, no heartbeat and no other request's end says so."""
    original, refusals = DecodeService._check_open, itertools.count()

    def check_open(self: DecodeService) -> None:
        if next(refusals) == 0:
            raise Overloaded("full")
        original(self)

    monkeypatch.setattr(DecodeService, "_check_open", check_open)
    registry = RegistryServer()
    registry.start()
    try:
        async with running_stack(registry.url, tmp_path, prefill=0) as stack:
            registry.kill()
            request = long_running(20, 20)
            outcome = await stack.generate(request)
            assert_right(outcome, request)
            assert [bool(attempt.failure) for attempt in outcome.ledger.attempts] == [True, False]
    finally:
        registry.kill()


def everything_but_timing(outcome: Outcome) -> tuple[Any, ...]:
    """Cached tokens depend on the path by nature."""
    tokens = [
        (token.token_id, token.logprob, [(top.token_id, top.logprob) for top in token.top_logprobs])
        for response in outcome.responses
        for token in response.tokens
    ]
    usage = outcome.last.usage
    ended = outcome.last.finish_reason, outcome.last.stop_match, usage.prompt_tokens, usage.completion_tokens
    return tokens, outcome.text, ended


async def test_18_every_path_gives_the_same_answer(registry_url: str, tmp_path: Path) -> None:
    """Colocated, pulled, with a prefix hit on both pods, preempted, and replayed after the decode pod's death."""
    request = tokens_request(
        prompt_of(60), temperature=0.9, seed=5, max_tokens=60, min_tokens=60, logprobs=3, presence_penalty=1.0
    )
    answers = {}
    async with running_stack(registry_url, tmp_path / "alone", prefill=0) as stack:
        answers["colocated"] = await stack.generate(request)
    async with running_stack(registry_url, tmp_path / "pair") as stack:
        answers["pulled"] = await stack.generate(request)
        answers["cached"] = await stack.generate(request)
        assert answers["cached"].last.usage.cached_tokens > 0
    async with running_stack(registry_url, tmp_path / "tiny", pod={"num_blocks": 10} | SLOW) as stack:
        rivals = [stack.generate(long_running(20, 80, seed)) for seed in range(3)]
        answers["preempted"], *others = await asyncio.gather(stack.generate(request), *rivals)
        assert sum(o.ledger.num_preemptions for o in (answers["preempted"], *others)) > 0
    answers["replayed"] = await with_a_death(registry_url, tmp_path / "death", request)
    right = everything_but_timing(answers["colocated"])
    for path, outcome in answers.items():
        assert everything_but_timing(outcome) == right, path


async def with_a_death(registry_url: str, directory: Path, request: pb.GenerateRequest) -> Outcome:
    """The answer to `request`, whose decode pod is killed after 20 tokens."""
    async with running_stack(registry_url, directory, decode=2, pod=SLOW) as stack:
        outcome, kill = Outcome(), None
        async for response in stack.client.generate(request):
            outcome.responses.append(response)
            if kill is None and len(outcome.token_ids) >= 20:
                ((served, _),) = stack.router.requests.live()
                kill = asyncio.create_task(stack.pods.kill(decode_pod_of(stack, served)))
        assert kill is not None
        await kill
        assert len(outcome.ledger.attempts) == 2
        return outcome


async def test_26_a_fresh_pod_takes_part_before_its_second_heartbeat(registry_url: str, tmp_path: Path) -> None:
    """Its first record is enough: the second one would come after a minute."""
    async with running_stack(registry_url, tmp_path, prefill=0, decode=0) as stack:
        request = long_running(10, 10)
        waiting = asyncio.create_task(stack.generate(request))
        await stack.pods.start("decode", heartbeat_interval_s=60)
        await stack.pods.start("prefill", heartbeat_interval_s=60)
        assert_right(await waiting, request)
        await stack.until_pods(2)
        outcome = await stack.generate(request)
        assert [bool(attempt.prefill_pod) for attempt in outcome.ledger.attempts] == [True]


def test_every_test_that_the_list_names_exists() -> None:
    listed = (ROOT / "docs" / "failures.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", listed)
    assert len(named) > 28, "one at least for every class"
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", listed, re.MULTILINE)] == list(range(1, 30))
