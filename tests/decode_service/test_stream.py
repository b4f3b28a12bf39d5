"""One stream's messages: one a step, merged while the router lags, bounded, with beats between, and ended once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from decode_service import stream as stream_module
from decode_service.stream import HEARTBEAT_S, TokenStream
from proto import common_pb2, pods_pb2
from proto.errors import PodUnavailable, from_info
from proto.frames import HEADER_BYTES, frame
from tests.support.polling import until

EPOCH = "epoch"
HELLO = pods_pb2.StreamTokensRequest(router_id="router", epoch=EPOCH)
BEAT = pods_pb2.StreamTokensRequest()


class Wire:
    """A transport that keeps the messages that are written to it."""

    def __init__(self) -> None:
        self.messages: list[pods_pb2.StepTokens] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        payload = data[HEADER_BYTES:]
        assert data == frame(payload), "one frame a write"
        self.messages.append(pods_pb2.StepTokens.FromString(payload))

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else ("127.0.0.1", 1)

    def setsockopt(self, *option: int) -> None:
        pass


class Router:
    """A stream with what its router would see of it."""

    def __init__(self, max_pending_tokens: int = 1000) -> None:
        self.wire = Wire()
        self.num_ends = 0
        self.stream = TokenStream(EPOCH, self._greet, self._on_end, max_pending_tokens=max_pending_tokens)
        self.stream.connection.connection_made(self.wire)  # type: ignore[arg-type]  # all of it that is used

    def _greet(self, stream: TokenStream, hello: pods_pb2.StreamTokensRequest) -> None:
        stream.open(hello.router_id)

    def _on_end(self, stream: TokenStream) -> None:
        self.num_ends += 1

    def say(self, message: pods_pb2.StreamTokensRequest) -> None:
        self.stream.connection.data_received(frame(message.SerializeToString()))

    def take(self) -> list[pods_pb2.StepTokens]:
        """The messages since the last call."""
        taken, self.wire.messages = self.wire.messages, []
        return taken


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    router.say(HELLO)
    assert router.take() == [pods_pb2.StepTokens(epoch=EPOCH)], "the stream is open"
    yield router
    router.stream.end()


def add(stream: TokenStream, step: int, name: str, *ids: int, reason: common_pb2.FinishReason.ValueType = 0) -> None:  # type: ignore[assignment]  # 0 is the unset value
    news = stream.news_of(step, name)
    news.tokens.extend(common_pb2.TokenOutput(token_id=i) for i in ids)
    news.finish_reason = reason


def tokens(name: str, *ids: int, reason: common_pb2.FinishReason.ValueType = 0) -> pods_pb2.SequenceTokens:  # type: ignore[assignment]  # 0 is the unset value
    return pods_pb2.SequenceTokens(
        sequence_id=name, tokens=[common_pb2.TokenOutput(token_id=i) for i in ids], finish_reason=reason
    )


async def test_a_step_is_one_message(router: Router) -> None:
    add(router.stream, 1, "a", 10)
    add(router.stream, 1, "b", 20)
    assert router.take() == []
    router.stream.flush()
    router.stream.flush()
    assert router.take() == [pods_pb2.StepTokens(epoch=EPOCH, step=1, sequences=[tokens("a", 10), tokens("b", 20)])]
    add(router.stream, 2, "b", 21)
    router.stream.flush()
    assert router.take() == [pods_pb2.StepTokens(epoch=EPOCH, step=2, sequences=[tokens("b", 21)])]


async def test_what_was_sent_takes_no_memory(router: Router) -> None:
    process = psutil.Process()
    name = "x" * 200
    for step in range(40_000):  # 20 MB
        if step == 2000:
            rss = process.memory_info().rss
        add(router.stream, step, name, step)
        router.stream.flush()
        router.take()
    assert process.memory_info().rss - rss < 5 << 20


async def test_a_lagging_router_gets_steps_merged(router: Router) -> None:
    router.stream.connection.pause_writing()
    add(router.stream, 1, "a", 10)
    router.stream.flush()
    add(router.stream, 2, "a", 11)
    add(router.stream, 2, "b", 20)
    router.stream.flush()
    add(router.stream, 3, "a", 12, reason=common_pb2.FINISH_REASON_STOP)
    router.stream.flush()
    assert router.take() == []
    router.stream.connection.resume_writing()
    merged = [tokens("a", 10, 11, 12, reason=common_pb2.FINISH_REASON_STOP), tokens("b", 20)]
    assert router.take() == [pods_pb2.StepTokens(epoch=EPOCH, step=3, sequences=merged)]


async def test_unread_tokens_are_bounded() -> None:
    router = Router(max_pending_tokens=3)
    router.say(HELLO)
    router.stream.connection.pause_writing()
    for step in range(3):
        add(router.stream, step, "ab"[step % 2], step)
        router.stream.flush()
    assert router.num_ends == 0
    add(router.stream, 3, "b", 4)
    router.stream.flush()
    assert router.num_ends == 1
    assert router.take()[-1].error.kind == common_pb2.ERROR_KIND_OVERLOADED
    assert router.wire.is_closed


async def test_it_beats(router: Router) -> None:
    started = asyncio.get_running_loop().time()
    await until(lambda: len(router.wire.messages) >= 2)
    assert asyncio.get_running_loop().time() - started >= 2 * HEARTBEAT_S * 0.9
    assert all(message == pods_pb2.StepTokens(epoch=EPOCH) for message in router.take())


async def test_a_silent_router_is_cut_off_and_one_that_beats_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 0.01)
    silent, beating = Router(), Router()
    silent.say(HELLO)
    beating.say(HELLO)
    async with asyncio.timeout(30):
        while not silent.stream.ended:
            await asyncio.sleep(0.01)
            beating.say(BEAT)
    assert not beating.stream.ended
    assert "no word from the router" in silent.take()[-1].error.message
    beating.stream.end()


async def test_a_connection_that_does_not_say_hello_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HELLO_S", 0.01)
    router = Router()
    await until(lambda: router.stream.ended)
    assert router.wire.is_closed


async def test_after_its_end_nothing_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 0.01)
    router = Router()
    router.say(HELLO)
    router.stream.end()
    router.stream.connection.connection_lost(None)
    await asyncio.sleep(0)
    ended = weakref.ref(router.stream)
    del router
    await asyncio.sleep(0.05)
    gc.collect()
    assert ended() is None


async def test_what_was_added_before_a_clean_end_is_sent(router: Router) -> None:
    add(router.stream, 1, "a", 10)
    router.stream.end()
    add(router.stream, 2, "a", 11)
    router.stream.flush()
    assert router.take() == [pods_pb2.StepTokens(epoch=EPOCH, step=1, sequences=[tokens("a", 10)])]
    assert router.wire.is_closed


async def test_an_error_ends_it_at_once(router: Router) -> None:
    add(router.stream, 1, "a", 10)
    router.stream.end(PodUnavailable("gone"))
    router.stream.end()
    (message,) = router.take()
    assert not message.sequences
    error = from_info(message.error)
    assert isinstance(error, PodUnavailable)
    assert error.message == "gone"
    assert router.num_ends == 1


async def test_the_end_of_the_connection_is_its_end(router: Router) -> None:
    router.stream.connection.connection_lost(None)
    await asyncio.sleep(0)
    assert router.stream.ended
    assert router.num_ends == 1
