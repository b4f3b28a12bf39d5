"""What goes over the wire: headers, events, the small endpoints, large bodies, and the stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.app import build_app
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from proto.errors import PodUnavailable
from proto.inference_pb2 import GenerateResponse, GetStatusResponse
from router.gateway_client import GatewayClient
from tests.gateway.conftest import BODY_LIMITS
from tests.gateway.scripted import ScriptedRouter, answer
from tests.gateway.test_disconnect import LIMIT_S, RawClient
from tests.support.polling import until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[Any]:
    """The data of server-sent events: JSON objects, and [DONE] as a string."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


async def test_chat_stream_on_the_wire(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(CHAT, json=body, headers={"x-request-id": "mine-1"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine-1"
    assert response.headers["x-pdserve-request-id"] == "req-1"
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert all(c["usage"] is None for c in chunks)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_whole_answer_on_the_wire(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "mine-2"})
    assert response.headers["x-request-id"] == "mine-2"
    assert response.headers["x-pdserve-request-id"] == "req-1"
    assert router.requests[0].request_id == "mine-2"
    body = response.json()
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": "chatcmpl-req-1",
        "object": "chat.completion",
        "model": "fake",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_error_in_mid_stream_is_the_last_event(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    router.play(answer("Hello", "never")[0], PodUnavailable("no decode pod is left"))
    response = await http.post(CHAT, json={"messages": HELLO, "stream": True})
    *chunks, error = events(response.text)
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert error == {
        "error": {
            "message": "no decode pod is left",
            "type": "service_unavailable_error",
            "param": None,
            "code": "pod_unavailable",
        }
    }


async def test_stream_without_a_finish_reason_ends_with_an_error(
    router: ScriptedRouter, http: httpx.AsyncClient
) -> None:
    router.play(*answer("Hello", "never")[:1])
    response = await http.post(CHAT, json={"messages": HELLO, "stream": True})
    assert events(response.text)[-1]["error"]["type"] == "server_error"


async def test_unknown_finish_reason_is_an_error_that_names_it(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    step = answer("Hello")[0]
    assert isinstance(step, GenerateResponse)
    step.finish_reason = 9  # type: ignore[assignment] # of a newer release
    router.play(step)
    response = await http.post(CHAT, json={"messages": HELLO})
    assert response.status_code == 500
    assert "finish_reason 9" in response.json()["error"]["message"]


async def test_line_ends_of_unicode_do_not_break_events(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    text = "a\u2028b\u2029c\u0085d\ne\rf"
    router.play(*answer(text))
    async with http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == text
    assert lines[-1] == "data: [DONE]"


async def test_a_message_without_new_text_still_gives_a_chunk(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    router.play(*answer("", "é"))
    response = await http.post("/v1/completions", json={"prompt": "hi", "stream": True})
    assert [c["choices"][0]["text"] for c in events(response.text)[:-1]] == ["", "é", ""]


async def test_timeline(http: httpx.AsyncClient) -> None:
    for name in ("req-7", "chatcmpl-req-7", "cmpl-req-7", "latest"):
        ledger = (await http.get(f"/v1/requests/{name}/timeline")).json()
        assert ledger["request_id"] == "req-7"
        assert ledger["transfer_bytes"] == 2**40
        assert ledger["entries"] == [{"stage": "queue", "seconds": 0.5}]
        assert ledger["attempts"] == [{"prefill_pod": "p", "decode_pod": "d", "reason": "idle", "failure": ""}]
    response = await http.get("/v1/requests/unknown/timeline")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "request_id")


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/fake"])
async def test_small_endpoints_answer_get_and_head(http: httpx.AsyncClient, path: str) -> None:
    got = await http.get(path)
    head = await http.head(path)
    assert (got.status_code, head.status_code) == (200, 200)
    assert got.content
    assert not head.content


async def test_health_follows_the_router(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    router.status = GetStatusResponse(serving=False, reason="no usable decode pod (2 draining)")
    response = await http.get("/health")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "not_serving")
    assert error["message"] == "no usable decode pod (2 draining)"
    router.status = GetStatusResponse(serving=True)
    assert (await http.get("/health")).status_code == 200
    await router.stop()
    response = await http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"].startswith("the router cannot be reached: ")


async def test_without_a_router_every_endpoint_says_503(router: ScriptedRouter, http: httpx.AsyncClient) -> None:
    await router.stop()
    for response in (
        await http.post(CHAT, json={"messages": HELLO}),
        await http.post(CHAT, json={"messages": HELLO, "stream": True}),
        await http.get("/v1/models"),
        await http.get("/v1/requests/latest/timeline"),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "service_unavailable_error"


async def test_a_bug_of_ours_is_a_500_in_the_same_shape(router: ScriptedRouter) -> None:
    async with GatewayClient(router.address) as client:
        client.list_models = None  # type: ignore[method-assign, assignment] # the bug
        client.generate = None  # type: ignore[method-assign, assignment] # another one
        app = build_app(client, Metrics(), BODY_LIMITS)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            for response in (await http.get("/v1/models"), await http.post(CHAT, json={"messages": HELLO})):
                assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


async def test_metrics_count_tokens_and_statuses(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json={"messages": HELLO})
    await http.post(CHAT, json={})
    lines = (await http.get("/metrics")).text.splitlines()
    assert 'pdserve_gateway_requests_total{endpoint="chat_completions",status="200"} 1.0' in lines
    assert 'pdserve_gateway_requests_total{endpoint="chat_completions",status="400"} 1.0' in lines
    assert 'pdserve_gateway_completion_tokens_total{endpoint="chat_completions"} 2.0' in lines
    assert 'pdserve_gateway_ttft_seconds_count{endpoint="chat_completions"} 1.0' in lines


async def test_a_large_body_is_refused_and_its_sender_sees_why(http: httpx.AsyncClient) -> None:
    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(160):
            yield b"x" * 65536

    for content in (b"x" * 10_000_000, chunked()):
        response = await http.post(CHAT, content=content)
        assert response.status_code == 413
        assert str(BODY_LIMITS.max_bytes) in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
    assert (await http.get("/v1/models")).status_code == 200


async def test_a_large_body_is_refused_before_it_is_sent(server: HttpServer) -> None:
    client = await RawClient.connect(server)
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
    assert b" 413 " in await client.read_until(b"\r\n")
    await client.read_until(b'"body_too_large"}}')
    await client.leave()


async def refuses_connections(server: HttpServer) -> None:
    """Returns once the server takes no new connection. To try before it listens no more would race with its end: what
    asyncio then accepts it forgets to close."""
    await until(lambda: not any(listener.is_serving() for listener in server.servers))
    with pytest.raises(ConnectionError):
        await RawClient.connect(server)


async def stop_while_streaming(router: ScriptedRouter, drain_timeout_s: int) -> str:
    """The rest of a stream whose server is told to stop, and whose router goes on once it has been told."""
    go_on = asyncio.Event()
    first, last = answer("Hello", " world")
    router.play(first, go_on, last)
    async with GatewayClient(router.address) as client:
        app = build_app(client, Metrics(), BODY_LIMITS)
        server = HttpServer(app, bind("127.0.0.1", 0), drain_timeout_s=drain_timeout_s)
        await server.start()
        raw = await RawClient.connect(server)
        raw.send("/v1/completions", {"prompt": "hi", "stream": True})
        await raw.read_until(b'"Hello"')
        stopping = asyncio.create_task(server.stop())
        await refuses_connections(server)
        if drain_timeout_s:
            go_on.set()
        rest = await asyncio.wait_for(raw.reader.readuntil(b"0\r\n\r\n"), LIMIT_S)
        await asyncio.wait_for(stopping, LIMIT_S)
        await raw.leave()
    return rest.decode()


async def test_stop_does_not_wait_for_a_refused_body(
    router: ScriptedRouter, server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = await RawClient.connect(server)
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
    await client.read_until(b'"body_too_large"}}')
    await asyncio.wait_for(server.stop(), LIMIT_S)
    await client.leave()
    assert "Exception in ASGI" not in caplog.text
    assert "without completing" not in caplog.text


async def test_stop_lets_running_streams_finish(router: ScriptedRouter) -> None:
    rest = await stop_while_streaming(router, drain_timeout_s=30)
    assert " world" in rest
    assert "[DONE]" in rest


async def test_stop_ends_with_an_error_what_outlasts_the_drain_time(
    router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    rest = await stop_while_streaming(router, drain_timeout_s=0)
    assert '"code":"stopping"' in rest
    assert "[DONE]" not in rest
    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.name in {"gateway.server", "uvicorn.error"}]
    assert told == [("WARNING", "1 request(s) are cut off: they did not end within the drain time")]
    await asyncio.wait_for(router.cancelled.get(), LIMIT_S)
