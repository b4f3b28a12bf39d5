"""Frames over real sockets: whole, in parts, many at once, too large, no messages; ends, and a reader that is slow."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from proto import pods_pb2
from proto.frames import CLOSE_S, HEADER_BYTES, FrameConnection, connect, frame

WAIT_S = 30.0
MAX_BYTES = 1000
BEAT = pods_pb2.StreamTokensRequest()


def hello(name: str) -> pods_pb2.StreamTokensRequest:
    return pods_pb2.StreamTokensRequest(router_id=name)


def framed(message: pods_pb2.StreamTokensRequest) -> bytes:
    return frame(message.SerializeToString())


def header(size: int) -> bytes:
    return size.to_bytes(HEADER_BYTES, "big")


class End:
    """One end, and what it was told."""

    def __init__(self) -> None:
        self.received: list[pods_pb2.StreamTokensRequest] = []
        self.num_writable = 0
        self.connection = FrameConnection(
            pods_pb2.StreamTokensRequest, self.received.append, max_bytes=MAX_BYTES, on_writable=self._on_writable
        )

    def _on_writable(self) -> None:
        self.num_writable += 1

    async def why(self) -> str:
        return await asyncio.wait_for(asyncio.shield(self.connection.closed), WAIT_S)


class Served(End):
    """An end that listens."""

    address = ""


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """For one connection."""
    end = Served()
    server = await asyncio.get_running_loop().create_server(lambda: end.connection, "127.0.0.1", 0)
    end.address = "{}:{}".format(*server.sockets[0].getsockname())
    yield end
    end.connection.abort("the test is over")
    server.close()
    await server.wait_closed()


@pytest.fixture
async def pair(served: Served) -> AsyncIterator[tuple[End, Served]]:
    end = End()
    await connect(end.connection, served.address)
    await until(lambda: served.connection.is_open)
    yield end, served
    end.connection.abort("the test is over")
    await end.why()


@pytest.fixture
async def raw(served: Served) -> AsyncIterator[asyncio.StreamWriter]:
    """A peer that writes what it likes to `served`."""
    _, writer = await asyncio.open_connection(*served.address.split(":"))
    await until(lambda: served.connection.is_open)
    yield writer
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.001)


async def test_messages_both_ways_in_order(pair: tuple[End, Served]) -> None:
    ours, theirs = pair
    names = [f"router-{n}" for n in range(100)]
    for name in names:
        ours.connection.send(hello(name))
    theirs.connection.send(BEAT)
    await until(lambda: len(theirs.received) == 100 and len(ours.received) == 1)
    assert [message.router_id for message in theirs.received] == names
    assert ours.received == [BEAT]
    assert ours.connection.heard
    assert ours.connection.peer == theirs.address


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64])
async def test_frames_in_parts(served: Served, raw: asyncio.StreamWriter, size: int) -> None:
    messages = [hello("a"), BEAT, hello("b" * 150), BEAT, BEAT, hello("c")]
    data = b"".join(map(framed, messages))
    for start in range(0, len(data), size):
        served.connection.data_received(data[start : start + size])
    assert served.received == messages


async def test_a_part_waits_for_its_rest(served: Served, raw: asyncio.StreamWriter) -> None:
    data = framed(hello("whole")) + framed(hello("half"))
    raw.write(data[:-3])
    await until(lambda: served.received == [hello("whole")])
    raw.write(data[-3:])
    await until(lambda: served.received == [hello("whole"), hello("half")])


async def test_the_largest_frame_and_one_byte_more(served: Served, raw: asyncio.StreamWriter) -> None:
    largest = hello("x" * (MAX_BYTES - 3))
    assert largest.ByteSize() == MAX_BYTES
    raw.write(framed(largest))
    await until(lambda: served.received == [largest])
    raw.write(header(MAX_BYTES + 1))
    assert await served.why() == "a frame of 1001 bytes: must be at most 1000"


@pytest.mark.parametrize(
    ("junk", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes"),
        (frame(b"\xff\xff\xff") + framed(hello("after")), "a frame of 3 bytes that is no StreamTokensRequest"),
    ],
)
async def test_junk_ends_it(served: Served, raw: asyncio.StreamWriter, junk: bytes, message: str) -> None:
    raw.write(framed(hello("before")) + junk)
    assert message in await served.why()
    assert served.received == [hello("before")]
    assert not served.connection.is_open


async def test_what_was_sent_before_a_close_arrives(pair: tuple[End, Served]) -> None:
    ours, theirs = pair
    theirs.connection.send(BEAT)  # unread by us when we close
    ours.connection.send(hello("last words"))
    ours.connection.close("done")
    ours.connection.close("for another reason")
    ours.connection.send(hello("too late"))
    assert "reset by peer" in await theirs.why()  # as TCP tells that something was left unread
    assert await ours.why() == "done"
    assert theirs.received == [hello("last words")]


async def test_an_aborted_one_delivers_nothing_more(pair: tuple[End, Served]) -> None:
    ours, theirs = pair
    ours.connection.send(hello("unread"))
    theirs.connection.abort("enough")
    assert await theirs.why() == "enough"
    await ours.why()
    assert theirs.received == []


async def test_messages_of_one_read_after_the_end_are_dropped(pair: tuple[End, Served]) -> None:
    ours, theirs = pair
    theirs.connection._on_message = lambda message: theirs.connection.abort(message.router_id)
    theirs.connection.data_received(framed(hello("first")) + framed(hello("second")))
    assert await theirs.why() == "first"
    await ours.why()


@asynccontextmanager
async def slow_reader(served: Served) -> AsyncIterator[socket.socket]:
    """Connected, and so far behind that `served` cannot write."""
    host, port = served.address.split(":")
    with socket.create_connection((host, int(port))) as reader:
        await until(lambda: served.connection.is_open)
        while served.connection.can_write:
            served.connection.send(hello("x" * 900))
            await asyncio.sleep(0)
        yield reader


async def test_a_slow_reader_is_noticed_and_its_catching_up_too(served: Served) -> None:
    async with slow_reader(served) as reader:
        assert served.num_writable == 0
        reader.setblocking(False)
        while not served.connection.can_write:
            with contextlib.suppress(BlockingIOError):
                reader.recv(1 << 20)
            await asyncio.sleep(0)
        assert served.num_writable == 1


async def test_a_close_does_not_wait_for_one_that_never_reads(served: Served) -> None:
    async with slow_reader(served):
        started = asyncio.get_running_loop().time()
        served.connection.close("done")
        assert await served.why() == "done"
        assert asyncio.get_running_loop().time() - started < 3 * CLOSE_S


async def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(OSError, match="onnect"):
        await connect(End().connection, f"127.0.0.1:{port}")
