"""The token port over real sockets: who is let in, who is not, and that nothing stays of those who left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from decode_service import stream as stream_module
from decode_service.stream import MAX_HELLO_BYTES, TokenStream
from decode_service.token_server import TokenServer
from proto import pods_pb2
from proto.errors import InvalidRequest, PdserveError, PodUnavailable, from_info
from proto.frames import HEADER_BYTES, FrameConnection, connect, frame
from proto.service import MAX_MESSAGE_BYTES

EPOCH = "epoch-1"
WAIT_S = 30.0


class Caller:
    """A router's end."""

    def __init__(self) -> None:
        self.messages: list[pods_pb2.StepTokens] = []
        self.connection = FrameConnection(pods_pb2.StepTokens, self.messages.append, max_bytes=MAX_MESSAGE_BYTES)

    @property
    def error(self) -> PdserveError | None:
        last = self.messages[-1] if self.messages else pods_pb2.StepTokens()
        return from_info(last.error) if last.HasField("error") else None

    async def until_closed(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.connection.closed), WAIT_S)


class Port:
    """A TokenServer, the streams that it told the end of, and its callers."""

    def __init__(self) -> None:
        self.ended: list[TokenStream] = []
        self.server = TokenServer("pod-1", EPOCH, self.ended.append)
        self.callers: list[Caller] = []

    async def call(self) -> Caller:
        caller = Caller()
        await connect(caller.connection, f"127.0.0.1:{self.server.port}")
        self.callers.append(caller)
        return caller

    async def greet(self, router_id: str = "router-1", epoch: str = EPOCH) -> Caller:
        caller = await self.call()
        caller.connection.send(pods_pb2.StreamTokensRequest(router_id=router_id, epoch=epoch))
        await until(lambda: bool(caller.messages))
        return caller

    async def until_left(self) -> None:
        await until(lambda: not self.server.connections)
        assert not self.server.streams


@pytest.fixture
async def port(no_leaked_tasks: None) -> AsyncIterator[Port]:
    port = Port()
    await port.server.start("127.0.0.1", 0)
    yield port
    await port.server.close()
    await port.until_left()
    for caller in port.callers:
        await caller.until_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.001)


async def test_a_router_is_let_in_and_leaves(port: Port) -> None:
    caller = await port.greet()
    assert caller.messages == [pods_pb2.StepTokens(epoch=EPOCH)]
    stream = port.server.stream_of("router-1")
    stream.news_of(7, "sequence").num_drafts = 1
    port.server.flush()
    await until(lambda: len(caller.messages) == 2)
    assert caller.messages[1].step == 7
    caller.connection.abort("leaves")
    await port.until_left()
    assert port.ended == [stream]
    with pytest.raises(PodUnavailable, match="has no open token stream") as caught:
        port.server.stream_of("router-1")
    assert (caught.value.field, caught.value.pod_id) == ("router_id", "pod-1")


async def test_a_second_stream_of_the_same_router_replaces_the_first(port: Port) -> None:
    first = await port.greet()
    replaced = port.server.stream_of("router-1")
    second = await port.greet()
    await first.until_closed()
    assert isinstance(first.error, PodUnavailable)
    assert "newer stream" in first.error.message
    assert port.ended == [replaced]
    assert port.server.stream_of("router-1") is not replaced
    assert second.connection.is_open


@pytest.mark.parametrize(
    ("router_id", "epoch", "error", "message"),
    [
        ("", EPOCH, InvalidRequest, "router_id = 0 characters: must be 1 to 256"),
        ("x" * 257, EPOCH, InvalidRequest, "router_id = 257 characters"),
        ("router-1", "epoch-0", PodUnavailable, "epoch = 'epoch-0': this is 'epoch-1'"),
        ("router-1", "", PodUnavailable, "epoch = ''"),
    ],
)
async def test_who_is_refused_hears_why(
    port: Port, caplog: pytest.LogCaptureFixture, router_id: str, epoch: str, error: type[PdserveError], message: str
) -> None:
    with caplog.at_level(logging.WARNING):
        caller = await port.greet(router_id, epoch)
        await caller.until_closed()
        await port.until_left()
    assert isinstance(caller.error, error)
    assert message in caller.error.message
    assert message in caplog.text
    assert not port.ended, "it never was a stream"


@pytest.mark.parametrize(
    ("junk", "message"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "a frame of 1195725856 bytes: must be at most"),
        ((MAX_HELLO_BYTES + 1).to_bytes(HEADER_BYTES, "big"), "a frame of 4097 bytes"),
        (frame(b"\xff\xff\xff\xff"), "that is no StreamTokensRequest"),
        (b"\x00", "the peer ended the connection"),
        (b"", "the peer ended the connection"),
    ],
)
async def test_junk_is_cut_off_with_one_line_and_others_go_on(
    port: Port, caplog: pytest.LogCaptureFixture, junk: bytes, message: str
) -> None:
    router = await port.greet()
    with caplog.at_level(logging.WARNING):
        _, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
        writer.write(junk)
        if message.startswith("the peer"):
            writer.close()
        await until(lambda: "refused" in caplog.text)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert len(caplog.records) == 1
    assert "refused 127.0.0.1:" in caplog.text
    assert message in caplog.text
    assert len(port.server.connections) == 1
    assert router.connection.is_open


async def test_junk_after_the_hello_ends_the_stream(port: Port) -> None:
    caller = await port.greet()
    caller.connection.send(pods_pb2.StreamTokensRequest(router_id="x" * MAX_HELLO_BYTES))
    await caller.until_closed()
    await port.until_left()
    assert len(port.ended) == 1


async def test_who_does_not_say_hello_is_cut_off(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "HELLO_S", 0.05)
    with caplog.at_level(logging.WARNING):
        caller = await port.call()
        await caller.until_closed()
        await port.until_left()
    assert "no hello within" in caplog.text


async def test_the_end_of_the_server_ends_all(port: Port) -> None:
    """Also a connection that has not said hello."""
    streaming, mute = await port.greet(), await port.call()
    await until(lambda: len(port.server.connections) == 2)
    port.server.stream_of("router-1").news_of(1, "sequence").num_drafts = 1
    await port.server.close()
    await streaming.until_closed()
    await mute.until_closed()
    assert len(streaming.messages) == 2, "with its last news"
    with pytest.raises(OSError, match="onnect"):
        await port.call()


async def test_a_taken_port_is_an_error(port: Port) -> None:
    with pytest.raises(OSError, match="in use"):
        await TokenServer("pod-2", EPOCH, lambda stream: None).start("127.0.0.1", port.server.port)
