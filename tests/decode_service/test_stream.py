"""The stream's buffer: one message a step, merged when the reader lags, bounded, and ended once."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from decode_service.stream import HEARTBEAT_S, TokenStream
from proto import common_pb2, pods_pb2
from proto.errors import PodUnavailable


def tokens(name: str, *ids: int, reason: common_pb2.FinishReason.ValueType = 0) -> pods_pb2.SequenceTokens:  # type: ignore[assignment]  # 0 is the unset value
    return pods_pb2.SequenceTokens(
        sequence_id=name, tokens=[common_pb2.TokenOutput(token_id=i) for i in ids], finish_reason=reason
    )


async def test_a_step_is_one_message() -> None:
    stream = TokenStream("router", "epoch")
    stream.push(1, tokens("a", 10))
    stream.push(1, tokens("b", 20))
    message = await stream.next()
    assert message == pods_pb2.StepTokens(epoch="epoch", step=1, sequences=[tokens("a", 10), tokens("b", 20)])


async def test_a_lagging_reader_gets_steps_merged() -> None:
    stream = TokenStream("router", "epoch")
    stream.push(1, tokens("a", 10))
    stream.push(2, tokens("a", 11))
    stream.push(2, tokens("b", 20))
    stream.push(3, tokens("a", 12, reason=common_pb2.FINISH_REASON_STOP))
    message = await stream.next()
    assert message is not None
    assert message.step == 3
    assert list(message.sequences) == [
        tokens("a", 10, 11, 12, reason=common_pb2.FINISH_REASON_STOP),
        tokens("b", 20),
    ]


async def test_without_tokens_it_beats() -> None:
    stream = TokenStream("router", "epoch")
    started = asyncio.get_running_loop().time()
    for beat in (1, 2):
        message = await asyncio.wait_for(stream.next(), 4 * HEARTBEAT_S)
        assert message == pods_pb2.StepTokens(epoch="epoch")
        assert asyncio.get_running_loop().time() - started >= beat * HEARTBEAT_S * 0.9
    stream.end()


async def test_after_its_end_nothing_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_service.stream.HEARTBEAT_S", 0.01)
    stream = TokenStream("router", "epoch")
    await stream.next()
    stream.end()
    ended = weakref.ref(stream)
    del stream
    await asyncio.sleep(0.05)
    gc.collect()
    assert ended() is None


async def test_what_was_pushed_before_a_clean_end_is_read() -> None:
    stream = TokenStream("router", "epoch")
    stream.push(1, tokens("a", 10))
    stream.end()
    stream.push(2, tokens("a", 11))
    message = await stream.next()
    assert message is not None
    assert list(message.sequences) == [tokens("a", 10)]
    assert await stream.next() is None


async def test_an_error_ends_it_at_once() -> None:
    stream = TokenStream("router", "epoch")
    stream.push(1, tokens("a", 10))
    stream.end(PodUnavailable("gone"))
    stream.end()
    with pytest.raises(PodUnavailable, match="gone"):
        await stream.next()


async def test_unread_tokens_are_bounded() -> None:
    stream = TokenStream("router", "epoch", max_pending_tokens=3)
    stream.push(1, tokens("a", 1, 2))
    stream.push(2, tokens("b", 3))
    assert not stream.overflown
    stream.push(3, tokens("b", 4))
    overflown: bool = stream.overflown
    assert overflown
    await stream.next()
    assert not stream.overflown
