"""A client that closes its socket cancels the router's calls, whatever the stage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from gateway import connection, exchange
from gateway.exchange import BodyLimits
from gateway.server import HttpServer
from router.gateway_client import GatewayClient
from tests.gateway.conftest import serving
from tests.gateway.scripted import ScriptedRouter, answer

LIMIT_S = 30.0


class RawClient:
    """Just enough HTTP to leave at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server: HttpServer) -> RawClient:
        host, port = server.address.split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(self, path: str, body: Any, *, only: int | None = None) -> None:
        """Posts `body` as JSON; `only`: no more than this many of its bytes."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        self.writer.write(head.encode() + raw[:only])

    async def read_until(self, words: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(words), LIMIT_S)

    async def leave(self, *, reset: bool = False) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.close()
        await self.writer.wait_closed()


async def dribble_until(client: RawClient, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Sends a byte every now and then until the answer is there."""
    answered = asyncio.create_task(answer)
    while not answered.done():
        client.writer.write(b" ")
        await asyncio.sleep(0.01)
    return await answered


async def idle(server: HttpServer) -> None:
    """Returns when the server has no request in work."""
    async with asyncio.timeout(LIMIT_S):
        while server.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)


async def count(http: httpx.AsyncClient, line: str) -> bool:
    return line in (await http.get("/metrics")).text.splitlines()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_before_the_first_token(
    router: ScriptedRouter, server: HttpServer, http: httpx.AsyncClient, stream: bool, reset: bool
) -> None:
    router.play(asyncio.Event())
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": "hi", "stream": stream})
    await asyncio.wait_for(router.arrived.get(), LIMIT_S)
    await client.leave(reset=reset)
    await asyncio.wait_for(router.cancelled.get(), LIMIT_S)
    await idle(server)
    assert await count(http, 'pdserve_gateway_requests_total{endpoint="completions",status="499"} 1.0')
    assert await count(http, 'pdserve_gateway_running_requests{endpoint="completions"} 0.0')


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_in_mid_stream(router: ScriptedRouter, server: HttpServer, reset: bool) -> None:
    router.play(*answer("Hello", "never")[:1], asyncio.Event())
    client = await RawClient.connect(server)
    client.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True})
    await client.read_until(b'"content":"Hello"')
    await client.leave(reset=reset)
    await asyncio.wait_for(router.cancelled.get(), LIMIT_S)
    await idle(server)


async def test_while_it_does_not_read(router: ScriptedRouter, server: HttpServer, http: httpx.AsyncClient) -> None:
    """The gateway is stuck in writing, not in reading from the router, when the client goes."""
    router.play(*[answer("x" * 1_000_000, "never")[0]] * 50, asyncio.Event())
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": "hi", "stream": True})
    await client.read_until(b"data: ")
    await client.leave(reset=True)
    await asyncio.wait_for(router.cancelled.get(), LIMIT_S)
    await idle(server)
    assert await count(http, 'pdserve_gateway_requests_total{endpoint="completions",status="499"} 1.0')


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_with_several_choices(router: ScriptedRouter, server: HttpServer, stream: bool) -> None:
    router.play(*answer("Hello", "never")[:1], asyncio.Event())
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": stream})
    for _ in range(4):
        await asyncio.wait_for(router.arrived.get(), LIMIT_S)
    await client.leave()
    for _ in range(4):
        await asyncio.wait_for(router.cancelled.get(), LIMIT_S)
    await idle(server)


async def test_before_the_body_is_complete(router: ScriptedRouter, server: HttpServer, http: httpx.AsyncClient) -> None:
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": "hi" * 100}, only=20)
    await client.writer.drain()
    async with asyncio.timeout(LIMIT_S):
        while not server.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
    await client.leave()
    await idle(server)
    assert router.requests == []
    assert await count(http, 'pdserve_gateway_requests_total{endpoint="completions",status="499"} 1.0')


async def test_a_body_that_falls_silent_is_given_up(
    router: ScriptedRouter, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "BODY_SILENCE_S", 0.05)
    monkeypatch.setattr(exchange, "LINGER_S", 0.05)
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": "hi" * 100}, only=20)
    answered = await asyncio.wait_for(client.reader.read(), LIMIT_S)
    assert answered.startswith(b"HTTP/1.1 408 ")
    assert b"20 bytes of the request body came, and no more within 0.05 s" in answered
    await client.leave()
    await idle(server)
    assert router.requests == []


async def test_a_slow_body_is_read_to_its_end(
    router: ScriptedRouter, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the silence that is allowed."""
    monkeypatch.setattr(exchange, "BODY_SILENCE_S", 1.0)
    client = await RawClient.connect(server)
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    client.send("/v1/completions", {"prompt": "hi", "stream": True}, only=20)
    for start in range(20, len(body), 2):
        await asyncio.sleep(0.2)
        client.writer.write(body[start : start + 2])
    await client.read_until(b"data: [DONE]\n\n")
    await client.leave()


async def test_a_body_that_never_ends_is_given_up(router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never silent, either."""
    monkeypatch.setattr(exchange, "LINGER_S", 1.0)
    async with GatewayClient(router.address) as to_router, serving(to_router, BodyLimits(100_000, 0.2)) as server:
        client = await RawClient.connect(server)
        client.send("/v1/completions", {"prompt": "hi" * 1000}, only=20)
        answered = await dribble_until(client, client.read_until(b"}}"))
        assert answered.startswith(b"HTTP/1.1 408 ")
        assert b"bytes of the request body came, and it is not complete after body_timeout_s = 0.2" in answered
        await client.leave()
        await idle(server)
    assert router.requests == []


HEADS = {"nothing": b"", "line ends": b"\r\n", "a part of a head": b"POST /v1/completions HTTP/1.1\r\nhost"}


@pytest.mark.parametrize("sent", HEADS.values(), ids=HEADS.keys())
async def test_a_connection_without_a_whole_head_is_closed(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    client = await RawClient.connect(server)
    client.writer.write(sent)
    assert await asyncio.wait_for(client.reader.read(), LIMIT_S) == b""
    await client.leave()


async def test_a_connection_is_closed_that_dribbles_after_its_answer(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that nobody reads, since its answer does not depend on it."""
    client = await RawClient.connect(server)
    for num_bytes in (0, 1000):
        client.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes)
        await client.read_until(b"}]}")
        monkeypatch.setattr(connection, "HEAD_S", 0.1)  # from the end of the second answer on
    with contextlib.suppress(ConnectionError):  # what is sent to a closed connection resets it
        assert await dribble_until(client, client.reader.read()) == b""
        await client.leave()


GET = b"GET /v1/models HTTP/1.1\r\n"
HUGE = 3 * connection.MAX_HEAD_BYTES
LARGE_HEADS = {
    "path": b"GET /" + b"x" * HUGE,
    "name": GET + b"x" * HUGE,
    "value": GET + b"x: " + b"y" * HUGE + b"\r\n\r\n",
    "headers": GET + b"x: y\r\n" * (HUGE // 6) + b"\r\n",
    "line ends": b"\r\n" * HUGE,
    "after an answer": GET + b"\r\n" + GET + b"x" * HUGE,
}


@pytest.mark.parametrize("sent", LARGE_HEADS.values(), ids=LARGE_HEADS.keys())
async def test_a_head_that_is_too_large_is_refused(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", LIMIT_S)  # that it is not reset by what it still sends
    client = await RawClient.connect(server)
    first, more = sent[: connection.MAX_HEAD_BYTES // 2], sent[connection.MAX_HEAD_BYTES // 2 :]
    client.writer.write(first)
    if sent.startswith(GET + b"\r\n"):
        await client.read_until(b"}]}")
    client.writer.write(more)
    answered = await asyncio.wait_for(client.reader.read(), LIMIT_S)
    assert answered.startswith(b"HTTP/1.1 431 ")
    assert b"larger than 65536 bytes" in answered
    assert answered.endswith(b'"code":"head_too_large"}}')
    await client.leave()


async def test_a_head_of_the_limit_is_served_and_one_byte_more_is_not(server: HttpServer) -> None:
    for num_bytes, status in ((connection.MAX_HEAD_BYTES, b"200"), (connection.MAX_HEAD_BYTES + 1, b"431")):
        client = await RawClient.connect(server)
        head = GET + b"x: \r\n\r\n"
        client.writer.write(head.replace(b"x: ", b"x: " + b"y" * (num_bytes - len(head))))
        assert (await client.read_until(b"\r\n")).startswith(b"HTTP/1.1 %s " % status)
        await client.leave()


async def test_bodies_and_pipelined_heads_are_not_taken_for_a_large_head(server: HttpServer) -> None:
    """They come at once: of more bytes than a head may have, and so is each body."""
    body = b'{"prompt": "%s", "stream": true}' % (b"x" * 70_000)
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    chunk = b"%x\r\n%s\r\n0\r\nx-trailer: y\r\n\r\n" % (len(body), body)
    client = await RawClient.connect(server)
    client.writer.write(
        (GET + b"x: " + b"y" * 1000 + b"\r\n\r\n") * 100
        + post + b"content-length: %d\r\n\r\n" % len(body) + body
        + post + b"transfer-encoding: chunked\r\n\r\n" + chunk
        + GET + b"connection: close\r\n\r\n"
    )  # fmt: skip
    answered = await asyncio.wait_for(client.reader.read(), LIMIT_S)
    assert answered.count(b"HTTP/1.1 200 ") == 103
    assert answered.count(b"data: [DONE]") == 2
    await client.leave()


@pytest.mark.parametrize("flood", [b"1;", b"0\r\nx: ", b"0\r\n"], ids=["chunk extension", "trailer", "trailers"])
async def test_a_chunked_body_collects_no_more_than_a_head(
    router: ScriptedRouter, server: HttpServer, flood: bytes
) -> None:
    client = await RawClient.connect(server)
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + flood)
    client.writer.write(b"x: y\r\n" * HUGE if flood == b"0\r\n" else b"y" * HUGE)
    with contextlib.suppress(ConnectionError):  # it still sends
        assert await asyncio.wait_for(client.reader.read(), LIMIT_S) == b""
        await client.leave()
    await idle(server)
    assert router.requests == []


async def test_nobody_is_hurried_while_an_answer_runs(router: ScriptedRouter, server: HttpServer) -> None:
    go_on = asyncio.Event()
    router.play(answer("Hello")[0], go_on)
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": "hi", "stream": True})
    await client.read_until(b'"Hello"')
    (served,) = server.server_state.connections
    assert isinstance(served, connection.Connection)
    assert served.head_timer is None
    go_on.set()
    await idle(server)
    assert served.head_timer is not None or served.transport.is_closing()
    await client.leave()


async def test_after_the_answer_is_nothing(server: HttpServer, http: httpx.AsyncClient) -> None:
    client = await RawClient.connect(server)
    client.send("/v1/completions", {"prompt": "hi", "stream": True})
    await client.read_until(b"data: [DONE]\n\n")
    await client.leave()
    await idle(server)
    assert await count(http, 'pdserve_gateway_requests_total{endpoint="completions",status="200"} 1.0')
