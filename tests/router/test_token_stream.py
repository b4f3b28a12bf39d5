"""The router's end of a token stream, against a pod that says what the test likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from proto import common_pb2, pods_pb2
from proto.errors import Overloaded, PodUnavailable
from proto.frames import FrameConnection, frame
from router import token_stream
from router.failures import CutOff, PodLost
from router.token_stream import SequenceStream, StreamReader
from tests.router.support import until
from tests.router.test_policy import decode

EPOCH = "e1"
OPEN = pods_pb2.StepTokens(epoch=EPOCH)


def tokens(sequence_id: str, *ids: int) -> pods_pb2.SequenceTokens:
    return pods_pb2.SequenceTokens(
        sequence_id=sequence_id, tokens=[common_pb2.TokenOutput(token_id=token_id) for token_id in ids]
    )


class ScriptedPod:
    """Lets in whoever says hello, unless `first` is another message."""

    def __init__(self) -> None:
        self.first = OPEN
        self.connections: list[FrameConnection[pods_pb2.StreamTokensRequest]] = []
        self.heard: list[list[pods_pb2.StreamTokensRequest]] = []  # on each
        self.aborted: list[str] = []
        self.address = ""

    def accept(self) -> FrameConnection[pods_pb2.StreamTokensRequest]:
        heard: list[pods_pb2.StreamTokensRequest] = []

        def on_message(message: pods_pb2.StreamTokensRequest) -> None:
            heard.append(message)
            if len(heard) == 1:
                connection.send(self.first)

        connection = FrameConnection(pods_pb2.StreamTokensRequest, on_message, max_bytes=1000)
        self.connections.append(connection)
        self.heard.append(heard)
        return connection

    @property
    def last(self) -> FrameConnection[pods_pb2.StreamTokensRequest]:
        return self.connections[-1]

    def send(self, *sequences: pods_pb2.SequenceTokens) -> None:
        self.last.send(pods_pb2.StepTokens(epoch=EPOCH, sequences=sequences))

    async def abort(self, sequence_id: str) -> None:
        self.aborted.append(sequence_id)


@pytest.fixture
async def pod() -> AsyncIterator[ScriptedPod]:
    scripted = ScriptedPod()
    server = await asyncio.get_running_loop().create_server(scripted.accept, "127.0.0.1", 0)
    scripted.address = "{}:{}".format(*server.sockets[0].getsockname())
    yield scripted
    for connection in scripted.connections:
        connection.abort("the test is over")
    server.close()
    await server.wait_closed()


class Reading:
    """A StreamReader, and what it told its owner."""

    def __init__(self, pod: ScriptedPod) -> None:
        self.changes: list[PodUnavailable | None] = []
        self.answers = asyncio.Event()
        self.answers.set()
        view = replace(decode("pod-1"), token_address=pod.address, epoch=EPOCH)
        self.reader = StreamReader(view, "router-1", self._until_it_answers, pod.abort, self.changes.append)

    async def _until_it_answers(self) -> None:
        await self.answers.wait()

    async def until_up(self) -> None:
        await until(lambda: self.reader.connected)

    async def why(self) -> str:
        """Why the first connection broke."""
        await until(lambda: len(self.changes) >= 2)
        first, second = self.changes[:2]
        assert first is None
        assert second is not None
        return second.message


@pytest.fixture
async def reading(pod: ScriptedPod) -> AsyncIterator[Reading]:
    reading = Reading(pod)
    yield reading
    await reading.reader.close()
    reading.reader.check_invariants(set(reading.reader._open))


async def failure(stream: SequenceStream) -> PodUnavailable:
    with pytest.raises(PodUnavailable) as caught:
        await asyncio.wait_for(stream.next(), 5)
    assert caught.value.pod_id == "pod-1"
    return caught.value


async def test_a_stream_is_taken_apart(pod: ScriptedPod, reading: Reading) -> None:
    with pytest.raises(PodUnavailable, match="no token stream"):
        reading.reader.open("a")
    await reading.until_up()
    assert pod.heard[0][0] == pods_pb2.StreamTokensRequest(router_id="router-1/1", epoch=EPOCH)
    a, b = reading.reader.open("a"), reading.reader.open("b")
    pod.send(tokens("a", 1), tokens("b", 2))
    pod.send(tokens("a", 3))
    assert [await a.next(), await a.next(), await b.next()] == [tokens("a", 1), tokens("a", 3), tokens("b", 2)]
    assert reading.changes == [None]


async def test_tokens_that_nobody_waits_for_are_discarded_and_their_pod_is_told_once(
    pod: ScriptedPod, reading: Reading
) -> None:
    await reading.until_up()
    reading.reader.open("closed")
    reading.reader.close_sequence("closed")
    for step in range(3):
        pod.send(tokens("unknown", step), tokens("closed", step))
    last = reading.reader.open("last")
    pod.send(tokens("last", 1))
    await last.next()
    await reading.reader._background.idle()
    assert pod.aborted == ["unknown"]


async def test_it_opens_none_before_the_pod_answers_calls(pod: ScriptedPod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the router would believe in a pod that it cannot ask for anything."""
    monkeypatch.setattr(token_stream, "SILENCE_S", 0.05)
    reading = Reading(pod)
    reading.answers.clear()
    await asyncio.sleep(0.15)
    assert not pod.connections
    reading.answers.set()
    await reading.until_up()
    await reading.reader.close()


async def test_it_beats(pod: ScriptedPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "SILENCE_S", 0.08)
    reading = Reading(pod)
    await until(lambda: any(len(heard) >= 3 for heard in pod.heard))
    heard = max(pod.heard, key=len)
    assert heard[1:] == [pods_pb2.StreamTokensRequest()] * (len(heard) - 1)
    await reading.reader.close()


@pytest.mark.parametrize(
    ("message", "kind", "why"),
    [
        (pods_pb2.StepTokens(epoch="e2"), PodLost, "another epoch answers at"),
        (
            pods_pb2.StepTokens(epoch=EPOCH, error=Overloaded("too slow").to_info()),
            CutOff,
            "the pod has ended the token stream: too slow",
        ),
        (b"\xff", PodLost, "a frame of 1 bytes that is no StepTokens"),
        (None, PodLost, "the peer ended the connection"),
    ],
)
async def test_why_it_broke_is_told_to_all_and_another_is_opened(
    pod: ScriptedPod,
    reading: Reading,
    message: pods_pb2.StepTokens | bytes | None,
    kind: type[PodUnavailable],
    why: str,
) -> None:
    await reading.until_up()
    stream = reading.reader.open("a")
    if isinstance(message, bytes):
        assert pod.last._transport is not None
        pod.last._transport.write(frame(message))
    elif message is not None:
        pod.last.send(message)
    else:
        pod.last.close("done")
    error = await failure(stream)
    assert (type(error), reading.changes[1:2]) == (kind, [error])
    assert why in await reading.why()
    await until(lambda: reading.changes[2:] == [None])
    assert [heard[0].router_id for heard in pod.heard] == ["router-1/1", "router-1/2"]
    assert await failure(stream) is error


async def test_a_pod_of_another_epoch_is_never_up(pod: ScriptedPod, reading: Reading) -> None:
    pod.first = pods_pb2.StepTokens(epoch="e2", error=PodUnavailable("epoch = 'e1': this is 'e2'").to_info())
    await until(lambda: len(pod.connections) >= 2)
    assert not reading.changes


async def test_a_silent_pod_is_given_up(pod: ScriptedPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "SILENCE_S", 0.1)
    reading = Reading(pod)
    await reading.until_up()
    assert await reading.why() == "pod pod-1: no word on the token stream for 0.1 s"
    await reading.reader.close()


async def test_a_cut_off_stream_fails_with_what_is_unread(pod: ScriptedPod, reading: Reading) -> None:
    await reading.until_up()
    stream = reading.reader.open("a")
    pod.send(tokens("a", 1))
    reading.reader.cut_off("the pod says so")
    error = await failure(stream)
    assert isinstance(error, CutOff)
    await until(lambda: reading.changes == [None, error, None])
    assert len(stream) == 0


async def test_nobody_listens_at_first(pod: ScriptedPod) -> None:
    reading = Reading(pod)
    reading.reader._pod = replace(reading.reader._pod, token_address="127.0.0.1:1")
    await asyncio.sleep(0.02)
    assert not reading.changes
    reading.reader._pod = replace(reading.reader._pod, token_address=pod.address)
    await reading.until_up()
    await reading.reader.close()
