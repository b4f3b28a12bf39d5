"""A decode pod alone: credits, decode-only sequences, streams, and every way out."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from decode_service import stream as stream_module
from pod.pod import Pod
from proto import common_pb2, kv_pb2, pods_pb2
from proto.errors import Cancelled, InvalidRequest, LayoutMismatch, LeaseExpired, Overloaded, PodUnavailable
from proto.frames import frame
from tests.support.cluster import Cluster, assert_idle, tokens_of
from tests.support.pod_client import PodClient, right_answer, spec
from tests.support.polling import until

ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "stop_token_ids": []}


@pytest.fixture
async def pod(cluster: Cluster) -> Pod:
    return await cluster.start("decode")


@pytest.fixture
async def client(cluster: Cluster, pod: Pod) -> PodClient:
    return await cluster.decode_client(pod)


def fingerprint(pod: Pod) -> str:
    return pod.plan.layout.fingerprint


async def decode_alone(client: PodClient, sequence: pods_pb2.SequenceSpec) -> list[int]:
    await client.start_decode(sequence)
    received = client.received[sequence.sequence_id]
    await received.until_ended()
    return [*sequence.output_token_ids, *received.token_ids]


# Credits.


async def test_a_credit_is_released_once(pod: Pod, client: PodClient) -> None:
    credit = await client.reserve(spec(range(40)), fingerprint(pod))
    assert (credit.epoch, credit.num_cached_tokens) == (pod.plan.epoch, 0)
    assert pod.load().num_credits == 1
    assert pod.load().num_free_blocks <= pod.load().num_blocks - 3
    assert not await client.release_credit(credit.credit_id, "another epoch")
    assert await client.release_credit(credit.credit_id, credit.epoch)
    assert not await client.release_credit(credit.credit_id, credit.epoch)


async def test_an_unused_credit_expires(pod: Pod, client: PodClient) -> None:
    credit = await client.reserve(sequence := spec([1, 2]), fingerprint(pod), ttl_ms=20)
    await assert_idle(pod)
    assert pod.metrics.registry.get_sample_value("pdserve_credits_expired_total") == 1
    with pytest.raises(LeaseExpired, match="credit_id"):
        await client.start_decode(*handed_over(sequence, pod), credit.credit_id)


async def test_another_layout_is_refused(pod: Pod, client: PodClient) -> None:
    with pytest.raises(LayoutMismatch, match="layout_fingerprint = 'other'"):
        await client.reserve(spec([1]), "other")


async def test_no_blocks_in_time_is_overload_with_a_delay(cluster: Cluster) -> None:
    pod = await cluster.start("decode", num_blocks=4)
    client = await cluster.decode_client(pod)
    credit = await client.reserve(spec(range(40)), fingerprint(pod))
    for wait_ms in (0, 10):
        full = f"no room within wait_ms = {wait_ms}: 0 of 4 KV blocks are free, 1 of max_num_seqs"
        with pytest.raises(Overloaded, match=full) as caught:
            await client.reserve(spec(range(40)), fingerprint(pod), wait_ms=wait_ms)
        assert caught.value.retry_after_ms > 0
    await client.release_credit(credit.credit_id)


async def test_waiting_calls_are_served_in_order(cluster: Cluster) -> None:
    pod = await cluster.start("decode", num_blocks=4)
    client = await cluster.decode_client(pod)
    held = await client.reserve(spec(range(40)), fingerprint(pod))
    order: list[int] = []

    async def wait(number: int) -> None:
        credit = await client.reserve(spec(range(number, number + 40)), fingerprint(pod), wait_ms=5000)
        order.append(number)
        await client.release_credit(credit.credit_id)

    waiters = []
    for number in range(4):
        waiters.append(asyncio.create_task(wait(number)))
        await until(lambda number=number: num_waiting(pod) == number + 1)  # type: ignore[misc]  # a bound loop variable
    await client.release_credit(held.credit_id)
    await asyncio.gather(*waiters)
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("way", ["cancel", "abort"])
async def test_waiting_calls_can_leave(cluster: Cluster, way: str) -> None:
    pod = await cluster.start("decode", num_blocks=4)
    client = await cluster.decode_client(pod)
    held = await client.reserve(spec(range(40)), fingerprint(pod))
    sequence = spec(range(40))
    waiting = asyncio.create_task(client.reserve(sequence, fingerprint(pod), wait_ms=5000))
    await until(lambda: num_waiting(pod) == 1)
    if way == "cancel":
        waiting.cancel()
        await asyncio.wait([waiting])
    else:
        assert await client.abort(sequence.sequence_id)
        with pytest.raises(Cancelled, match="aborted while it waited"):
            await waiting
    await client.release_credit(held.credit_id)
    await assert_idle(pod)


async def test_cancel_at_any_moment_of_a_reserve(pod: Pod, client: PodClient) -> None:
    for delay_ticks in range(10):
        sequence = spec([7, 8, delay_ticks])
        call = asyncio.create_task(client.reserve(sequence, fingerprint(pod)))
        for _ in range(delay_ticks):
            await asyncio.sleep(0.0005)
        call.cancel()
        await asyncio.wait([call])
        await client.abort(sequence.sequence_id)
        await assert_idle(pod)


# Decode-only.


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 600])
async def test_an_answer_of_its_own(client: PodClient, length: int) -> None:
    sequence = spec([n % 500 for n in range(length)], max_tokens=20)
    answer = right_answer(sequence)
    assert await decode_alone(client, sequence) == list(answer.output_ids)
    received = client.received[sequence.sequence_id]
    assert received.last.finish_reason == common_pb2.FinishReason.Value(f"FINISH_REASON_{answer.finish_reason.name}")
    first = received.messages[0]
    assert first.HasField("timings")
    assert first.timings.transfer_s == first.timings.first_step_s == 0
    assert first.timings.prefill_s > 0
    assert not any(message.HasField("timings") for message in received.messages[1:])


async def test_the_second_time_the_prompt_is_cached(client: PodClient) -> None:
    for expected in (0, 96):
        sequence = spec(range(100))
        await decode_alone(client, sequence)
        assert client.received[sequence.sequence_id].messages[0].num_cached_tokens == expected


async def test_replay_continues_where_it_stopped(client: PodClient) -> None:
    whole = right_answer(spec([5, 6, 7], temperature=0.7, seed=3)).output_ids
    sequence = spec([5, 6, 7], whole[:4], temperature=0.7, seed=3)
    assert await decode_alone(client, sequence) == list(whole)


async def test_many_sequences_share_one_message_a_step(cluster: Cluster) -> None:
    pod = await cluster.start("decode", fake_step_s=0.002)
    client = await cluster.decode_client(pod)
    sequences = [spec([n, n + 1], max_tokens=20, ignore_eos=True, stop_token_ids=[]) for n in range(8)]
    answers = await asyncio.gather(*(decode_alone(client, sequence) for sequence in sequences))
    assert answers == [list(right_answer(sequence).output_ids) for sequence in sequences]
    steps = [step for step in client.steps if step.sequences]
    assert len(steps) <= 40
    assert max(len(step.sequences) for step in steps) == 8
    assert [step.step for step in steps] == sorted({step.step for step in steps})


async def test_preempted_sequences_still_get_their_answer(cluster: Cluster) -> None:
    pod = await cluster.start("decode", num_blocks=8)
    client = await cluster.decode_client(pod)
    sequences = [spec([n] * 20, max_tokens=60, ignore_eos=True, stop_token_ids=[]) for n in range(1, 5)]
    answers = await asyncio.gather(*(decode_alone(client, sequence) for sequence in sequences))
    assert answers == [list(right_answer(sequence).output_ids) for sequence in sequences]
    assert sum(client.received[s.sequence_id].last.num_preemptions for s in sequences) > 0


# Aborts and refusals.


async def test_abort_while_decoding(cluster: Cluster) -> None:
    pod = await cluster.start("decode", fake_step_s=0.002)
    client = await cluster.decode_client(pod)
    sequence = spec([1, 2], **ENDLESS)
    await client.start_decode(sequence)
    await client.received[sequence.sequence_id].until_tokens(3)
    assert await client.abort(sequence.sequence_id)
    assert not await client.abort(sequence.sequence_id)
    await assert_idle(pod)


async def test_whatever_is_asked_for_needs_a_stream(cluster: Cluster, pod: Pod) -> None:
    """Else a call that a router made before its death, and that is read after its stream has ended, holds blocks."""
    client = cluster.client(pod)
    for call in (client.start_decode(spec([1])), client.reserve(spec([1]), fingerprint(pod))):
        with pytest.raises(PodUnavailable, match="has no open token stream"):
            await call
    await assert_idle(pod)


async def test_the_end_of_a_stream_ends_a_wait_for_blocks(cluster: Cluster) -> None:
    """The router is gone, though its call is still there."""
    pod = await cluster.start("decode", num_blocks=4)
    client, other = await cluster.decode_client(pod), await cluster.decode_client(pod, "router-2")
    held = await other.reserve(spec(range(40)), fingerprint(pod))
    waiting = asyncio.create_task(client.reserve(spec(range(40)), fingerprint(pod), wait_ms=60_000))
    await until(lambda: num_waiting(pod) == 1)
    await client.close_stream()
    with pytest.raises(Cancelled):
        await waiting
    assert pod.load().num_credits == 1
    await other.release_credit(held.credit_id)
    await assert_idle(pod)


async def test_the_same_sequence_twice_is_refused(pod: Pod, client: PodClient) -> None:
    credit = await client.reserve(sequence := spec([1]), fingerprint(pod))
    with pytest.raises(InvalidRequest, match=r"sequence\.sequence_id"):
        await client.start_decode(sequence)
    await client.release_credit(credit.credit_id)


def handed_over(
    sequence: pods_pb2.SequenceSpec, pod: Pod, **changes: Any
) -> tuple[pods_pb2.SequenceSpec, kv_pb2.KVHandoff]:
    """A StartDecode's arguments, without a prefill pod."""
    extended = pods_pb2.SequenceSpec.FromString(sequence.SerializeToString())
    extended.output_token_ids.append(9)
    fields: dict[str, Any] = {
        "sequence_id": sequence.sequence_id,
        "source_address": "127.0.0.1:1",
        "layout_fingerprint": fingerprint(pod),
        "num_tokens": len(sequence.prompt_token_ids),
        "first_token": common_pb2.TokenOutput(token_id=9),
        "lease_id": sequence.sequence_id,
        "lease_remaining_ms": 10_000,
    }
    return extended, kv_pb2.KVHandoff(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_tokens": 7}, InvalidRequest, r"handoff\.num_tokens = 7"),
        ({"first_token": common_pb2.TokenOutput(token_id=8)}, InvalidRequest, "first_token"),
        ({"layout_fingerprint": "other"}, LayoutMismatch, "other"),
    ],
)
async def test_a_hand_off_that_does_not_fit_is_refused(
    pod: Pod, client: PodClient, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    credit = await client.reserve(sequence := spec([1, 2]), fingerprint(pod))
    with pytest.raises(error, match=message):
        await client.start_decode(*handed_over(sequence, pod, **changes), credit.credit_id)
    assert await client.release_credit(credit.credit_id)


@pytest.mark.parametrize(
    ("sequence", "durations", "message"),
    [
        (spec([1], top_p=2.0), {}, r"sequence\.sampling\.top_p"),
        (spec([1]), {"ttl_ms": 0}, "ttl_ms"),
        (spec([1]), {"wait_ms": 3_600_000}, "wait_ms"),
        (spec([1] * 2000), {}, "slots"),
    ],
)
async def test_bad_requests_leave_the_pod_untouched(
    pod: Pod, client: PodClient, sequence: pods_pb2.SequenceSpec, durations: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await client.reserve(sequence, fingerprint(pod), **durations)
    await assert_idle(pod)


async def test_decode_only_that_can_never_run_is_refused(client: PodClient) -> None:
    with pytest.raises(InvalidRequest, match="slots"):
        await client.start_decode(spec([1] * 2000))


# Streams.


async def test_without_tokens_the_stream_beats(client: PodClient) -> None:
    await until(lambda: len(client.steps) >= 2)
    assert not any(step.sequences for step in client.steps)


async def test_the_end_of_a_stream_aborts_all_that_was_started_for_it(cluster: Cluster) -> None:
    pod = await cluster.start("decode", fake_step_s=0.002)
    client, other = await cluster.decode_client(pod), await cluster.decode_client(pod, "router-2")
    sequences = [spec([n], **ENDLESS) for n in range(3)]
    for sequence in sequences:
        await client.start_decode(sequence)
    await client.reserve(spec([9]), fingerprint(pod))
    survivor = spec([50, 51], max_tokens=30)
    await other.start_decode(survivor)
    await client.received[sequences[0].sequence_id].until_tokens(2)
    await client.close_stream()
    await other.received[survivor.sequence_id].until_ended()
    assert other.received[survivor.sequence_id].token_ids == list(right_answer(survivor).output_ids)
    assert other.received.keys() == {survivor.sequence_id}
    await assert_idle(pod)


async def test_a_second_stream_replaces_the_first(cluster: Cluster) -> None:
    pod = await cluster.start("decode", fake_step_s=0.002)
    first = await cluster.decode_client(pod)
    lost = spec([1], **ENDLESS)
    await first.start_decode(lost)
    await first.received[lost.sequence_id].until_tokens(1)
    second = await cluster.decode_client(pod)
    await first.until_stream_ended()
    assert isinstance(first.stream_error, PodUnavailable)
    sequence = spec([1, 2])
    assert await decode_alone(second, sequence) == list(right_answer(sequence).output_ids)
    assert lost.sequence_id not in second.received


async def test_a_reader_that_never_reads_is_dropped(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module.TokenStream.__init__, "__kwdefaults__", {"max_pending_tokens": 500})
    pod = await cluster.start("decode", num_blocks=512)
    client, tokens = cluster.client(pod), tokens_of(pod)
    hello = pods_pb2.StreamTokensRequest(router_id=client.router_id, epoch=pod.plan.epoch).SerializeToString()
    with socket.create_connection(("127.0.0.1", tokens.port)) as never_reads:
        never_reads.sendall(frame(hello))
        await until(lambda: client.router_id in tokens.streams)
        stream = tokens.stream_of(client.router_id)
        stream.connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # type: ignore[union-attr]  # connected
        for _ in range(8):
            await client.start_decode(spec([1, 2], **ENDLESS, logprobs=20))
        await assert_idle(pod)
        assert "too slowly" in await asyncio.wait_for(asyncio.shield(stream.connection.closed), 5)
        with pytest.raises(PodUnavailable, match="no open token stream"):
            await client.start_decode(spec([1]))
    assert not tokens.connections


async def test_stop_tells_the_streams(cluster: Cluster) -> None:
    pod = await cluster.start("decode", fake_step_s=0.002)
    client = await cluster.decode_client(pod)
    sequence = spec([1], **ENDLESS)
    await client.start_decode(sequence)
    await client.received[sequence.sequence_id].until_tokens(1)
    await cluster.stop(pod)
    await client.until_stream_ended()
    assert isinstance(client.received[sequence.sequence_id].error(), PodUnavailable)
    assert client.stream_error is None


async def test_draining_finishes_what_runs_and_takes_nothing_new(cluster: Cluster) -> None:
    pod = await cluster.start("decode", fake_step_s=0.005)
    client = await cluster.decode_client(pod)
    sequence = spec([1, 2], max_tokens=20, ignore_eos=True, stop_token_ids=[])
    await client.start_decode(sequence)
    drain = asyncio.create_task(pod.drain(timeout_s=5))
    await until(lambda: pod.state != 1)
    with pytest.raises(PodUnavailable, match="draining"):
        await client.reserve(spec([1]), fingerprint(pod))
    with pytest.raises(PodUnavailable, match="draining"):
        await client.start_decode(spec([1]))
    await drain
    await client.received[sequence.sequence_id].until_ended()
    assert client.received[sequence.sequence_id].token_ids == list(right_answer(sequence).output_ids)


def num_waiting(pod: Pod) -> int:
    """Calls that wait for blocks."""
    return sum(entry.state.value == "waiting" for entry in pod.role.table.entries())  # type: ignore[attr-defined]
