"""A gateway's two clients of a router, one stream or one process: the answers and errors of Generate from both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path

import pytest

from proto import inference_pb2
from proto.errors import Cancelled, DeadlineExceeded, NotFound, Overloaded, PodUnavailable
from router.client import Client
from router.gateway_client import GatewayClient
from router.local_client import LocalClient
from router.server import Router
from tests.router.support import (
    SLOW_STEPS,
    WAIT_S,
    Outcome,
    collect,
    failure,
    first_response,
    live_ids,
    long_running,
    prompt_of,
    running_stack,
    tokens_request,
    until,
)
from tests.router.test_end_to_end import assert_right

ClientOf = Callable[[Router], AbstractAsyncContextManager[Client]]

REFUSED = [
    tokens_request(prompt_of(3), max_tokens=0),
    tokens_request(prompt_of(3), stop=[""]),
    tokens_request([]),
    inference_pb2.GenerateRequest(model="another"),
    tokens_request(prompt_of(4000), max_tokens=500),
]


@pytest.fixture(params=["one stream", "one process"])
def client_of(request: pytest.FixtureRequest) -> ClientOf:
    if request.param == "one stream":
        return lambda router: GatewayClient(router.address)
    return lambda router: LocalClient(router.inference)


async def test_many_answers_at_once_are_right(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path) as stack, client_of(stack.router) as client:
        requests = [tokens_request(prompt_of(5 + i, i), max_tokens=10 + i) for i in range(16)]
        outcomes = await asyncio.gather(*(collect(client, request) for request in requests))
        for outcome, request in zip(outcomes, requests, strict=True):
            assert_right(outcome, request)


@pytest.mark.parametrize("request_", REFUSED)
async def test_refused_as_by_generate(
    registry_url: str, tmp_path: Path, client_of: ClientOf, request_: inference_pb2.GenerateRequest
) -> None:
    async with running_stack(registry_url, tmp_path) as stack, client_of(stack.router) as client:
        error, expected = await failure(client, request_), await failure(stack.client, request_)
        assert (type(error), vars(error)) == (type(expected), vars(expected))
        fine = long_running(3, 4)
        assert_right(await collect(client, fine), fine)


async def test_no_room_is_told_with_the_delay(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with (
        running_stack(registry_url, tmp_path, prefill=0, decode=0, queue_wait_s=0.05) as stack,
        client_of(stack.router) as client,
    ):
        error, expected = await failure(client, long_running(3, 4)), await failure(stack.client, long_running(3, 4))
        assert isinstance(error, Overloaded | PodUnavailable)
        assert (type(error), error.message, error.retry_after_ms > 0) == (
            type(expected),
            expected.message,
            expected.retry_after_ms > 0,
        )


async def test_the_deadline_passes(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack, client_of(stack.router) as client:
        with pytest.raises(DeadlineExceeded):
            await collect(client, long_running(50, 900), timeout_s=0.3)
        await stack.until_rest()
        await stack.pods.assert_idle()


async def test_abort_by_id(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack, client_of(stack.router) as client:
        task = await first_response(client, long_running(50, 900))
        (request_id,) = await live_ids(stack, 1)
        assert await client.abort(request_id)
        with pytest.raises(Cancelled, match="was aborted"):
            await task


async def test_one_that_leaves_is_cancelled_alone(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack, client_of(stack.router) as client:
        staying = await first_response(client, long_running(20, 200, seed=1))
        async with aclosing(client.generate(long_running(50, 900))) as responses:
            async for _ in responses:
                break
        await until(lambda: len(stack.router.requests) == 1)
        assert not staying.done()
        assert_right(await staying, long_running(20, 200, seed=1))
        await stack.until_rest()
        await stack.pods.assert_idle()


async def test_the_end_of_the_client_cancels_all(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack:
        async with client_of(stack.router) as client:
            tasks = [await first_response(client, long_running(50, 900, seed)) for seed in range(3)]
        for task in tasks:
            with pytest.raises(Cancelled):
                await task
        await stack.until_rest()
        await stack.pods.assert_idle()


async def is_refused(client: Client) -> bool:
    try:
        await collect(client, long_running(3, 4))
    except PodUnavailable:
        return True
    return False


async def test_a_router_that_stops_finishes_what_runs(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with (
        running_stack(registry_url, tmp_path, pod=SLOW_STEPS, stop_grace_s=WAIT_S) as stack,
        client_of(stack.router) as client,
    ):
        request = long_running(20, 80)
        running = await first_response(client, request)
        stopping = asyncio.create_task(stack.router.stop())
        while not await is_refused(client):
            pass  # that the router stops takes a moment to reach a client
        assert_right(await running, request)
        await asyncio.wait_for(stopping, WAIT_S / 2)  # and not only when its grace is over


async def test_models_status_and_timelines(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path) as stack, client_of(stack.router) as client:
        assert await client.list_models() == await stack.client.list_models()
        assert await client.why_not_serving() is None
        outcome = await collect(client, long_running(3, 4))
        await until(lambda: len(stack.router.requests) == 0)
        for request_id in ("", outcome.ledger.request_id):
            assert await client.timeline(request_id) == outcome.ledger
        with pytest.raises(NotFound) as unknown:
            await client.timeline("no such")
        with pytest.raises(NotFound) as expected:
            await stack.client.timeline("no such")
        assert vars(unknown.value) == vars(expected.value)


async def test_what_a_client_gets_is_its_own(registry_url: str, tmp_path: Path, client_of: ClientOf) -> None:
    async with running_stack(registry_url, tmp_path) as stack, client_of(stack.router) as client:
        request = long_running(3, 4)
        async with aclosing(client.generate(request)) as responses:
            received = [response async for response in responses]
        expected = [response.SerializeToString(deterministic=True) for response in received]
        await stack.until_rest()
        (await client.timeline()).request_id = "another"
        assert (await client.timeline()).request_id == received[0].request_id
        assert [response.SerializeToString(deterministic=True) for response in received] == expected


async def test_a_slow_reader_holds_up_neither_pods_nor_others(
    registry_url: str, tmp_path: Path, client_of: ClientOf
) -> None:
    async with running_stack(registry_url, tmp_path) as stack, client_of(stack.router) as client:
        request, other = long_running(20, 1000), long_running(5, 20, seed=1)
        async with aclosing(client.generate(request)) as slow:
            received = [await anext(slow)]
            assert_right(await collect(client, other), other)
            await until(lambda: len(stack.router.requests) == 0)  # all is computed, and nothing held for it
            await stack.pods.assert_idle()
            received += [response async for response in slow]
        assert_right(Outcome(received), request)
