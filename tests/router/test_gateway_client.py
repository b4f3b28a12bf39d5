"""A gateway's client on its one stream: the same statuses as Generate, whatever happens to clients and routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from proto import common_pb2, inference_pb2, inference_pb2_grpc
from proto.errors import InvalidRequest, PdserveError, PodUnavailable, from_rpc
from proto.service import channel
from router import client as router_client
from router import gateway_client
from router.gateway_client import MAX_UNREAD, GatewayClient
from router.server import Router
from tests.gateway.scripted import ScriptedRouter, answer
from tests.router.support import (
    SLOW_STEPS,
    WAIT_S,
    collect,
    failure,
    first_response,
    long_running,
    router_settings,
    running_stack,
    until,
)
from tests.router.test_end_to_end import assert_right
from tests.support.ports import free_port


@asynccontextmanager
async def gateway_of(router: Router | ScriptedRouter) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(router.address) as client:
        yield client


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedRouter]:
    router = ScriptedRouter()
    await router.start()
    yield router
    await router.stop()


async def test_several_gateways_on_one_router(registry_url: str, tmp_path: Path) -> None:
    async with (
        running_stack(registry_url, tmp_path, pod=SLOW_STEPS) as stack,
        gateway_of(stack.router) as one,
        gateway_of(stack.router) as other,
    ):
        requests = [long_running(10, 60, seed) for seed in range(6)]
        leaving = await first_response(one, long_running(10, 900))
        outcomes = asyncio.gather(*(collect((one, other)[i % 2], request) for i, request in enumerate(requests)))
        leaving.cancel()
        for outcome, request in zip(await outcomes, requests, strict=True):
            assert_right(outcome, request)


async def test_one_that_leaves_before_its_request_was_sent(scripted: ScriptedRouter) -> None:
    async with gateway_of(scripted) as client:
        leaving = asyncio.create_task(collect(client, long_running(1, 1)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert (await collect(client, long_running(1, 1))).text == "Hello world"
        assert len(scripted.requests) == 1 + scripted.cancelled.qsize()


async def test_a_slow_reader_holds_up_nobody_and_little_memory(scripted: ScriptedRouter) -> None:
    """Of 1,000 responses that are there at once the gateway gets MAX_UNREAD ahead of its reader."""
    texts = [f"{i} " for i in range(1000)]
    scripted.script = lambda request: answer(*texts if request.request_id == "slow" else ("Hello",))
    async with gateway_of(scripted) as client:
        slow = client.generate(inference_pb2.GenerateRequest(request_id="slow"))
        received = [(await anext(slow)).text]
        assert (await collect(client, inference_pb2.GenerateRequest())).text == "Hello"
        assert client.num_unread <= MAX_UNREAD
        received += [response.text async for response in slow]
        assert received == texts


async def test_a_stream_that_drains_is_left_for_another(scripted: ScriptedRouter) -> None:
    """As when the address leads to another router already."""
    go_on = asyncio.Event()
    first, last = answer("Hello", " world")
    scripted.play(first, go_on, last)
    async with gateway_of(scripted) as client:
        running = await first_response(client, inference_pb2.GenerateRequest())
        scripted.streams[0].drain()
        await until(lambda: client._stream is not None and not client._stream.takes_starts)
        scripted.play(first, last)
        assert (await collect(client, inference_pb2.GenerateRequest())).text == "Hello world"
        assert [len(stream) for stream in scripted.streams] == [1, 0]
        go_on.set()
        assert (await asyncio.wait_for(running, WAIT_S)).text == "Hello world"


async def test_a_router_that_must_stop_ends_each_with_one_status(registry_url: str, tmp_path: Path) -> None:
    async with (
        running_stack(registry_url, tmp_path, pod=SLOW_STEPS, stop_grace_s=0.1) as stack,
        gateway_of(stack.router) as client,
    ):
        tasks = [await first_response(client, long_running(20, 900, seed)) for seed in range(3)]
        await asyncio.wait_for(stack.router.stop(), WAIT_S / 2)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [PodUnavailable] * 3


async def test_another_router_at_the_same_address(registry_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with (
        running_stack(registry_url, tmp_path, pod=SLOW_STEPS, port=port) as stack,
        gateway_of(stack.router) as client,
    ):
        running = await first_response(client, long_running(20, 900))
        await stack.router.stop()
        with pytest.raises(PdserveError):
            await running
        gone = await failure(client, long_running(3, 4))
        assert isinstance(gone, PodUnavailable)
        assert gone.message == "the router cannot be reached: try again"
        successor = Router(router_settings(stack.pods, port=port))
        await successor.start()
        try:
            async with asyncio.timeout(WAIT_S):
                while await client.why_not_serving() is not None:  # noqa: ASYNC110  # what a load balancer does
                    await asyncio.sleep(0.01)
            request = long_running(3, 4)
            assert_right(await collect(client, request), request)
        finally:
            await successor.stop()


async def test_a_stream_that_breaks_after_the_last_response_concerns_nobody(scripted: ScriptedRouter) -> None:
    never = asyncio.Event()
    scripted.play(*answer("Hello", " world"), never)  # complete, but its end is never said
    async with gateway_of(scripted) as client:
        responses = client.generate(inference_pb2.GenerateRequest())
        texts = [(await anext(responses)).text, (await anext(responses)).text]
        await scripted.stop()
        assert [response async for response in responses] == []
        assert "".join(texts) == "Hello world"


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
async def test_a_status_that_the_router_did_not_give_blames_no_request(
    code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_off(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[object, object]) -> None:
        await anext(requests)  # else gRPC may put a status of its own in place of ours, as it cannot write
        await context.abort(code, "broken")

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(break_off)
    server = grpc.aio.server()
    server.add_registered_method_handlers("pdserve.v1.Inference", {"GenerateMany": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with GatewayClient(f"127.0.0.1:{port}") as client:
        error = await failure(client, inference_pb2.GenerateRequest())
    await server.stop(None)
    assert isinstance(error, PodUnavailable)
    assert error.message == "the router cannot be reached: try again"
    assert f"{code.name}: broken" in caplog.text


async def test_large_requests_are_packed_apart_and_too_large_ones_refused(
    scripted: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_client, "PACKED_BYTES", 1500)
    async with gateway_of(scripted) as client:
        sizes = [10, 1000, 1000, 4000, 10, 10]
        requests = [inference_pb2.GenerateRequest(text="x" * size) for size in sizes]
        outcomes = await asyncio.gather(*(collect(client, request) for request in requests))
        assert {outcome.text for outcome in outcomes} == {"Hello world"}
        assert Counter(len(request.text) for request in scripted.requests) == Counter(sizes)
        monkeypatch.setattr(router_client, "MAX_REQUEST_BYTES", 2000)
        error = await failure(client, requests[3])
        assert isinstance(error, InvalidRequest)
        assert "must be at most 2000" in error.message


async def test_a_finish_reason_is_the_last_response(scripted: ScriptedRouter) -> None:
    async with gateway_of(scripted) as client:
        outcome = await collect(client, inference_pb2.GenerateRequest())
        assert [r.finish_reason for r in outcome.responses] == [
            common_pb2.FINISH_REASON_UNSPECIFIED,
            common_pb2.FINISH_REASON_STOP,
        ]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x0a\xff", "the request is not a valid message"),
        (
            inference_pb2.GenerateManyRequest(starts=[inference_pb2.StartCall(call_id=1)]).SerializeToString(),
            "starts.max_unread = 0: must be 1 or more",
        ),
    ],
    ids=["undecodable", "contract"],
)
async def test_a_gateway_that_breaks_the_contract_is_told_how(
    scripted: ScriptedRouter, data: bytes, complaint: str
) -> None:
    async with channel(scripted.address) as to_router:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = to_router.stream_stream(
            "/pdserve.v1.Inference/GenerateMany"
        )
        call = method()
        await call.write(data)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(call.read(), WAIT_S)
    error = from_rpc(ended.value)
    assert isinstance(error, InvalidRequest)
    assert complaint in error.message


async def test_a_gateway_that_has_said_all_gets_the_rest(scripted: ScriptedRouter) -> None:
    go_on = asyncio.Event()
    first, last = answer("Hello", " world")
    scripted.play(first, go_on, last)
    start = inference_pb2.StartCall(call_id=1, max_unread=10)
    async with channel(scripted.address) as to_router:
        call = inference_pb2_grpc.InferenceStub(to_router).GenerateMany()
        await call.write(inference_pb2.GenerateManyRequest(starts=[start]))
        await call.done_writing()
        await asyncio.wait_for(scripted.arrived.get(), WAIT_S)
        go_on.set()
        texts = [r.text async for message in call for news in message.calls for r in news.responses]
        assert "".join(texts) == "Hello world"
        assert await call.code() == grpc.StatusCode.OK
