"""The router's side of a gateway's stream, without gRPC: what is said together, held back, refused and ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from proto import inference_pb2
from proto.errors import InvalidRequest, Overloaded, PodUnavailable, from_info
from router import gateway_stream
from router.gateway_stream import GatewayStream
from router.requests import Sink

WAIT_S = 30.0


class Requests:
    """What the stream started: the requests' sinks, deadlines and tasks, by the request's own id."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.timeouts: dict[str, float | None] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, request: inference_pb2.GenerateRequest, timeout_s: float | None, sink: Sink) -> asyncio.Task[None]:
        self.sinks[request.request_id], self.timeouts[request.request_id] = sink, timeout_s
        self.tasks[request.request_id] = task = asyncio.create_task(_for_ever())
        return task


async def _for_ever() -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def requests() -> AsyncIterator[Requests]:
    requests = Requests()
    yield requests
    for task in requests.tasks.values():
        task.cancel()
    if requests.tasks:
        await asyncio.wait(requests.tasks.values())


@pytest.fixture
def stream(requests: Requests) -> GatewayStream:
    return GatewayStream(requests.start)


def starting(call_id: int, name: str, max_unread: int = 100, **fields: int) -> inference_pb2.GenerateManyRequest:
    request = inference_pb2.GenerateRequest(request_id=name)
    start = inference_pb2.StartCall(call_id=call_id, request=request, max_unread=max_unread, **fields)
    return inference_pb2.GenerateManyRequest(starts=[start])


def having_read(call_id: int, num_responses: int) -> inference_pb2.GenerateManyRequest:
    read = inference_pb2.CallRead(call_id=call_id, num_responses=num_responses)
    return inference_pb2.GenerateManyRequest(reads=[read])


def say(sink: Sink, *texts: str) -> None:
    for text in texts:
        sink.put(inference_pb2.GenerateResponse(text=text))


async def news(stream: GatewayStream) -> dict[int, list[str]]:
    """The next message: call -> its texts, with "END" where it ends."""
    message = await asyncio.wait_for(stream.next(), WAIT_S)
    assert message is not None
    return {c.call_id: [r.text for r in c.responses] + ["END"] * c.ended for c in message.calls}


async def is_silent(stream: GatewayStream) -> bool:
    waiting = asyncio.create_task(stream.next())
    done, _ = await asyncio.wait([waiting], timeout=0.02)
    waiting.cancel()
    return not done


async def test_all_that_is_new_is_one_message(stream: GatewayStream, requests: Requests) -> None:
    for call_id, name in enumerate("abc", start=1):
        stream.receive(starting(call_id, name))
    for name in "abc":
        say(requests.sinks[name], f"{name}1")
    say(requests.sinks["b"], "b2")
    assert await news(stream) == {1: ["a1"], 2: ["b1", "b2"], 3: ["c1"]}
    assert await is_silent(stream)


async def test_no_more_than_may_be_unread(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "slow", max_unread=2))
    stream.receive(starting(2, "fast", max_unread=2))
    say(requests.sinks["slow"], *"abcde")
    requests.sinks["slow"].end(None)
    assert await news(stream) == {1: ["a", "b"]}
    assert await is_silent(stream)
    say(requests.sinks["fast"], "x")
    assert await news(stream) == {2: ["x"]}, "the others are not held up"
    stream.receive(having_read(1, 1))
    assert await news(stream) == {1: ["c"]}
    stream.receive(having_read(1, 5))
    assert await news(stream) == {1: ["d", "e", "END"]}
    assert len(stream) == 1


async def test_the_end_needs_no_room(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "a", max_unread=1))
    say(requests.sinks["a"], "a1")
    assert await news(stream) == {1: ["a1"]}
    requests.sinks["a"].end(None)
    assert await news(stream) == {1: ["END"]}


async def test_an_error_is_the_end_with_all_its_details(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "a"))
    error = Overloaded("no room", field="f", retry_after_ms=70, pod_id="p")
    requests.sinks["a"].end(error)
    message = await stream.next()
    assert message is not None
    (ended,) = message.calls
    assert ended.ended
    told = from_info(ended.error)
    assert (type(told), vars(told)) == (type(error), vars(error))
    assert len(stream) == 0


async def test_a_message_has_a_size_and_nothing_is_lost(
    stream: GatewayStream, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_stream, "MAX_MESSAGE_BYTES", 2500)
    texts = [f"{i}" * 1000 for i in range(7)]
    stream.receive(starting(1, "a"))
    stream.receive(starting(2, "b"))
    for name in "ab":
        say(requests.sinks[name], *texts)
        requests.sinks[name].end(None)
    received: dict[int, list[str]] = {1: [], 2: []}
    while len(stream):
        message = await news(stream)
        assert sum(len(text) for texts_of_call in message.values() for text in texts_of_call) <= 3500 + len("END")
        for call_id, more in message.items():
            received[call_id] += more
    assert received == {1: [*texts, "END"], 2: [*texts, "END"]}


async def test_what_is_cancelled_ends_and_says_nothing_more(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "a"))
    stream.receive(starting(2, "b"))
    say(requests.sinks["a"], "a1")
    say(requests.sinks["b"], "b1")
    stream.receive(inference_pb2.GenerateManyRequest(cancels=[1]))
    assert await news(stream) == {2: ["b1"]}
    await asyncio.wait([requests.tasks["a"]], timeout=WAIT_S)
    assert requests.tasks["a"].cancelled()
    say(requests.sinks["a"], "a2")
    requests.sinks["a"].end(None)
    assert await is_silent(stream)
    assert len(stream) == 1


async def test_reads_and_cancels_of_calls_that_have_ended_are_late_not_wrong(stream: GatewayStream) -> None:
    stream.receive(having_read(9, 1))
    stream.receive(inference_pb2.GenerateManyRequest(cancels=[9]))
    assert await is_silent(stream)


async def test_deadlines_go_with_their_requests(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "none"))
    stream.receive(starting(2, "some", timeout_ms=1500))
    stream.receive(starting(3, "passed", timeout_ms=0))
    assert requests.timeouts == {"none": None, "some": 1.5, "passed": 0.0}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (starting(5, "again"), "starts.call_id = 5: must be more than 5, the one before it"),
        (starting(0, "zero"), "starts.call_id = 0: must be more than 5, the one before it"),
        (starting(6, "closed", max_unread=0), "starts.max_unread = 0: must be 1 or more"),
    ],
)
async def test_what_breaks_the_contract(
    stream: GatewayStream, message: inference_pb2.GenerateManyRequest, complaint: str
) -> None:
    stream.receive(starting(5, "first"))
    with pytest.raises(InvalidRequest) as refused:
        stream.receive(message)
    assert refused.value.message == complaint


async def test_draining_starts_nothing_and_finishes_what_runs(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "a"))
    stream.drain()
    message = await stream.next()
    assert message is not None
    assert message.draining
    stream.receive(starting(2, "late"))
    message = await stream.next()
    assert message is not None
    assert not message.draining, "once is enough"
    assert isinstance(from_info(message.calls[0].error), PodUnavailable)
    assert "late" not in requests.sinks
    say(requests.sinks["a"], "a1")
    requests.sinks["a"].end(None)
    assert await news(stream) == {1: ["a1", "END"]}
    assert await asyncio.wait_for(stream.next(), WAIT_S) is None


async def test_a_drained_stream_ends_with_the_cancellation_of_its_last_call(stream: GatewayStream) -> None:
    stream.receive(starting(1, "a"))
    stream.drain()
    await stream.next()
    ending = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.receive(inference_pb2.GenerateManyRequest(cancels=[1]))
    assert await asyncio.wait_for(ending, WAIT_S) is None


async def test_the_end_of_the_stream_is_the_end_of_all(stream: GatewayStream, requests: Requests) -> None:
    stream.receive(starting(1, "a"))
    stream.receive(starting(2, "b"))
    stream.cancel()
    await asyncio.wait(requests.tasks.values(), timeout=WAIT_S)
    assert all(task.cancelled() for task in requests.tasks.values())
