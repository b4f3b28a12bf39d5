"""Pods die, hang, restart and differ; clients leave. The stream goes on or ends with one status, and nothing leaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import redis.asyncio

from decode_service.servicer import DecodeService
from pod.pod import Pod
from prefill_service.servicer import PrefillService
from proto import common_pb2, inference_pb2, inference_pb2_grpc
from proto.errors import Cancelled, Overloaded, PodUnavailable
from proto.registry import pod_key
from proto.service import CHANNEL_OPTIONS
from router.attempt import Attempt
from router.lifecycle import State
from router.request import Request
from router.retries import MAX_FAILURES
from tests.router.support import (
    SLOW_STEPS,
    Outcome,
    Stack,
    long_running,
    on_entering,
    prompt_of,
    right_answer,
    running_stack,
    tokens_request,
    until,
)
from tests.router.test_end_to_end import assert_adds_up, assert_right
from tests.support.ports import free_port
from tests.support.registry import RegistryServer

NUM_GONE = MAX_FAILURES + 3
SLOW_PREFILL: dict[str, object] = {"fake_prefill_s_per_token": 0.002}


async def generate_and(
    stack: Stack,
    request: inference_pb2.GenerateRequest,
    num_tokens: int,
    fault: Callable[[], Coroutine[Any, Any, object]],
    outcome: Outcome,
) -> Outcome:
    """The whole answer, in `outcome`; `fault` is started once the client has had `num_tokens`."""
    task: asyncio.Task[object] | None = None
    async for response in stack.client.generate(request):
        outcome.responses.append(response)
        if task is None and len(outcome.token_ids) >= num_tokens:
            task = asyncio.create_task(fault())
    assert task is not None, "the answer was too short for the fault"
    await task
    return outcome


def decoding_pod(stack: Stack) -> Pod:
    """The pod that decodes the only request."""
    ((request, _),) = stack.router.requests.live()
    name = request.ledger().attempts[-1].decode_pod
    return next(pod for pod in stack.pods.pods if pod.plan.pod_id == name)


def kill_decode_pod(stack: Stack) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: stack.pods.kill(decoding_pod(stack))


# --- Decode pods ----------------------------------------------------------------------------------------------------


async def test_more_pods_are_gone_than_attempts_are_allowed(registry_url: str, tmp_path: Path) -> None:
    """A machine went down with all its prefill pods, whose records live on. They never had the request."""
    async with running_stack(registry_url, tmp_path) as stack:
        (gone, _) = stack.pods.pods
        record = gone.record()
        record.heartbeat, record.heartbeat_interval_s = 1, 60.0
        await stack.pods.kill(gone)
        async with redis.asyncio.from_url(registry_url) as registry:
            for number in range(NUM_GONE):
                record.pod_id, record.address = f"gone-{number}", f"127.0.0.1:{free_port()}"
                await registry.set(pod_key(stack.pods.name, record.pod_id), record.SerializeToString(), px=60_000)
        await until(lambda: len(list(stack.router.cluster.snapshot())) == NUM_GONE + 1)
        outcome = await stack.generate(request := tokens_request(prompt_of(20)))
        assert_right(outcome, request)
        *failed, last = outcome.ledger.attempts
        assert len({attempt.prefill_pod for attempt in failed}) == NUM_GONE > MAX_FAILURES
        assert all("failed to connect" in attempt.failure for attempt in failed)
        assert last.prefill_pod == ""
        await stack.until_rest()


async def test_a_request_that_kills_pods_does_not_visit_them_all(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took it, and were lost with it."""
    async with running_stack(registry_url, tmp_path, prefill=MAX_FAILURES + 2) as stack:
        killing: list[asyncio.Task[None]] = []

        async def die(self: PrefillService, *_: Any) -> None:
            (dying,) = (pod for pod in stack.pods.pods if pod.role is self)
            killing.append(asyncio.create_task(stack.pods.kill(dying)))
            await asyncio.Event().wait()

        monkeypatch.setattr(PrefillService, "_prefill", die)
        with pytest.raises(PodUnavailable):
            await stack.generate(tokens_request(prompt_of(20)))
        await asyncio.gather(*killing)
        assert len(killing) == MAX_FAILURES


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("after", [1, 2, 10, 25])
async def test_a_decode_pod_dies_in_mid_stream(registry_url: str, tmp_path: Path, prefill: int, after: int) -> None:
    async with running_stack(registry_url, tmp_path, prefill=prefill, decode=2, pod=SLOW_STEPS) as stack:
        request = long_running(50, 40)
        outcome = await generate_and(stack, request, after, kill_decode_pod(stack), Outcome())
        assert_right(outcome, request)
        assert_adds_up(outcome.ledger)
        first, last = outcome.ledger.attempts[0], outcome.ledger.attempts[-1]
        assert first.decode_pod != last.decode_pod
        assert first.prefill_pod == last.prefill_pod, "the healthy leg is not blamed"
        assert (bool(first.failure), last.failure) == (True, "")


async def test_all_decode_pods_die(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS, queue_wait_s=0.3, resume_wait_s=0.3) as stack:
        with pytest.raises(PodUnavailable, match="to go on elsewhere: waited"):
            await generate_and(stack, long_running(50, 200), 5, kill_decode_pod(stack), Outcome())
        ledger = await stack.client.timeline()
        assert ledger.outcome == "pod_unavailable"
        assert ledger.attempts[-1].failure


async def test_a_decode_pod_comes_back_on_its_address(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack:
        decode = stack.pods.pods[1]

        request = long_running(50, 60)
        outcome = await generate_and(stack, request, 10, lambda: stack.pods.restart(decode), Outcome())
        assert_right(outcome, request)
        assert {a.decode_pod for a in outcome.ledger.attempts} == {decode.plan.pod_id}


async def test_a_full_decode_pod_is_not_a_failed_one(registry_url: str, tmp_path: Path) -> None:
    """Reserve finds no blocks: another pod is asked, and nobody is blamed."""
    async with running_stack(registry_url, tmp_path, decode=1, pod=SLOW_STEPS | {"num_blocks": 8}) as stack:
        requests = [long_running(60, 30, seed) for seed in range(6)]
        for outcome, request in zip(await asyncio.gather(*map(stack.generate, requests)), requests, strict=True):
            assert_right(outcome, request)


# --- Prefill pods ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.RESERVING, State.PREFILLING, State.HANDING_OFF, State.TRANSFERRING])
async def test_a_prefill_pod_dies(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    async with running_stack(registry_url, tmp_path, prefill=2, pod=SLOW_PREFILL) as stack:
        tasks: list[asyncio.Task[None]] = []

        def kill(request: Request) -> None:
            name = request.ledger().attempts[-1].prefill_pod if request.ledger().attempts else ""
            pod = next((p for p in stack.pods.pods if p.plan.pod_id == name), stack.pods.pods[0])
            tasks.append(asyncio.create_task(stack.pods.kill(pod)))

        on_entering(monkeypatch, state, kill)
        request = long_running(100, 20)
        assert_right(await stack.generate(request), request)
        await asyncio.gather(*tasks)
        assert len(tasks) == 1


async def test_the_only_prefill_pod_dies(registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stack(registry_url, tmp_path, prefill=1, pod=SLOW_PREFILL) as stack:
        tasks: list[asyncio.Task[None]] = []
        kill = stack.pods.kill(stack.pods.pods[0])
        on_entering(monkeypatch, State.PREFILLING, lambda _: tasks.append(asyncio.create_task(kill)))
        request = long_running(100, 20)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert [a.prefill_pod != "" for a in outcome.ledger.attempts] == [True, False], "decode-only is the way out"
        await asyncio.gather(*tasks)


async def test_a_credit_outlives_a_prompt_of_minutes(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine minutes into the prefill, by the decode pod's clock, its blocks are still reserved."""
    async with running_stack(registry_url, tmp_path, pod=SLOW_PREFILL) as stack:
        role = next(pod.role for pod in stack.pods.pods if isinstance(pod.role, DecodeService))
        expired: list[object] = []
        on_entering(
            monkeypatch,
            State.PREFILLING,
            lambda _: expired.append(role.table.take_expired(time.monotonic() + 9 * 60)),
        )
        request = long_running(50, 5)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert len(outcome.ledger.attempts) == 1
        assert expired == [[]]


async def test_an_expired_lease_is_recomputed(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks have another owner by the time that the decode pod reads them."""
    async with running_stack(registry_url, tmp_path, prefill=0) as stack:
        await stack.pods.start("prefill", num_blocks=8)
        await stack.until_pods(2)
        original = Attempt.start
        lost: list[str] = []

        async def start(self: Attempt) -> None:
            if not lost and self.placement.prefill is not None:
                lost.append(self.sequence_id)
                await self.placement.prefill.release_lease(self.sequence_id, self.placement.prefill.pod.epoch)
                await stack.generate(tokens_request(prompt_of(120, seed=9), max_tokens=1))
            await original(self)

        monkeypatch.setattr(Attempt, "start", start)
        request = long_running(100, 20)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        first, second = outcome.ledger.attempts
        assert first.failure.startswith("transfer_failed")
        assert (first.prefill_pod, first.decode_pod) == (second.prefill_pod, second.decode_pod), "nobody is blamed"


async def test_a_decode_pod_that_refuses_frees_the_prefill_side_at_once(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its credit has gone: the hand-off's lease is released long before it expires, and the request starts anew."""
    async with running_stack(registry_url, tmp_path) as stack:
        original = Attempt.start
        refused: list[str] = []

        async def start(self: Attempt) -> None:
            if not refused:
                refused.append(self.sequence_id)
                await self.placement.decode.abort(self.sequence_id)
            await original(self)

        monkeypatch.setattr(Attempt, "start", start)
        request = long_running(100, 20)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        first, second = outcome.ledger.attempts
        assert "credit_id" in first.failure
        assert (first.prefill_pod, first.decode_pod) == (second.prefill_pod, second.decode_pod), "nobody is blamed"
        await stack.pods.assert_idle()


# --- Room -----------------------------------------------------------------------------------------------------------


async def test_overload_is_refused_with_a_delay(registry_url: str, tmp_path: Path) -> None:
    pod = SLOW_STEPS | {"max_num_seqs": 1}
    async with running_stack(registry_url, tmp_path, prefill=0, pod=pod, queue_wait_s=0.05) as stack:
        running = asyncio.create_task(stack.generate(long_running(10, 300)))
        await until(lambda: stack.router.requests.states() == ["decoding"])
        with pytest.raises(Overloaded, match="all 1 decode pods are busy") as caught:
            await stack.generate(long_running(10, 10))
        assert 250 <= caught.value.retry_after_ms <= 30_000
        assert len((await running).token_ids) == 300


async def test_too_many_waiters_are_refused_at_once(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=0, decode=0, max_waiting=2) as stack:
        waiting = []
        for number in (1, 2):
            waiting.append(asyncio.create_task(stack.generate(long_running(10, 10))))
            await until(lambda: stack.router.cluster.num_waiting == number)  # noqa: B023  # awaited in the loop
        with pytest.raises(Overloaded, match="requests are waiting"):
            await stack.generate(long_running(10, 10))
        urgent = long_running(10, 10)
        urgent.priority = -1
        waiting.append(asyncio.create_task(stack.generate(urgent)))
        await until(lambda: any(task.done() for task in waiting))
        await stack.pods.start("decode")
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(r, Overloaded) for r in results] == [False, True, False], "the last in order had to go"


async def test_a_silent_call_outlives_its_keepalive_pings(registry_url: str, tmp_path: Path) -> None:
    """A server that takes pings for abuse would end this call after the fourth one."""
    options = list((dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1100}).items())
    async with (
        running_stack(registry_url, tmp_path, prefill=0, decode=0, queue_wait_s=6.0) as stack,
        grpc.aio.insecure_channel(stack.router.address, options=options) as to_router,
    ):
        call = inference_pb2_grpc.InferenceStub(to_router).Generate(long_running(10, 10))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_requests_wait_for_the_first_pod(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=0, decode=0) as stack:
        request = long_running(10, 10)
        task = asyncio.create_task(stack.generate(request))
        await until(lambda: stack.router.cluster.num_waiting == 1)
        await stack.pods.start("decode")
        assert_right(await task, request)


# --- Pods that may not be used --------------------------------------------------------------------------------------


async def test_different_layouts_are_refused_by_name(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, prefill=1, decode=0) as stack:
        await stack.pods.start("decode", block_size=32)
        await stack.until_pods(2)
        with pytest.raises(PodUnavailable, match="block_size 16 != 32"):
            await stack.generate(long_running(10, 10))


async def test_a_draining_pod_finishes_but_takes_nothing_new(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, decode=2, pod=SLOW_STEPS) as stack:
        request = long_running(20, 100)
        running = asyncio.create_task(stack.generate(request))
        await until(lambda: stack.router.requests.states() == ["decoding"])
        draining = decoding_pod(stack)
        drain = asyncio.create_task(draining.drain(10.0))
        await until(lambda: any(pod.draining for pod in stack.router.cluster.snapshot()))
        others = await asyncio.gather(*(stack.generate(long_running(20, 5, seed)) for seed in range(8)))
        assert draining.plan.pod_id not in {a.decode_pod for outcome in others for a in outcome.ledger.attempts}
        outcome = await running
        assert_right(outcome, request)
        assert len(outcome.ledger.attempts) == 1
        await drain


# --- The registry and the router itself -----------------------------------------------------------------------------


async def test_the_registry_dies_and_comes_back_empty(tmp_path: Path) -> None:
    registry = RegistryServer()
    registry.start()
    try:
        async with running_stack(registry.url, tmp_path, pod=SLOW_STEPS) as stack:
            request = long_running(30, 300)
            running = asyncio.create_task(stack.generate(request))
            await until(lambda: stack.router.requests.states() == ["decoding"])
            registry.kill()
            during = long_running(20, 20)
            assert_right(await stack.generate(during), during)
            registry.start()
            assert_right(await stack.generate(during), during)
            outcome = await running
            assert_right(outcome, request)
            assert len(outcome.ledger.attempts) == 1, "nobody noticed"
    finally:
        registry.kill()


async def test_a_router_that_stops_ends_streams_with_an_error(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack:
        outcome = Outcome()

        async def read() -> None:
            async for response in stack.client.generate(long_running(30, 900)):
                outcome.responses.append(response)

        reading = asyncio.create_task(read())
        await until(lambda: len(outcome.token_ids) > 3)
        await stack.router.stop()
        with pytest.raises((Cancelled, PodUnavailable)):
            await reading
        assert outcome.last.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
        await stack.pods.assert_idle()


def test_the_fake_answers_are_long_enough() -> None:
    """min_tokens keeps the fake model from ending early; these tests rely on it."""
    assert len(right_answer(long_running(50, 40)).output_ids) == 40
    assert len(right_answer(tokens_request(prompt_of(50), max_tokens=40, min_tokens=40)).output_ids) == 40
