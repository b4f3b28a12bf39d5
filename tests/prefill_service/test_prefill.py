"""A prefill pod alone: the first token, the hand-off, the lease, and every way out."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from pod.pod import Pod
from proto import common_pb2, pods_pb2
from proto.errors import Cancelled, InvalidRequest, PodUnavailable, from_rpc
from tests.support.cluster import IDLE_S, Cluster, assert_idle
from tests.support.pod_client import LEASE_MS, PodClient, right_answer, spec
from tests.support.polling import until


@pytest.fixture
async def pod(cluster: Cluster) -> Pod:
    return await cluster.start("prefill")


@pytest.fixture
async def client(cluster: Cluster, pod: Pod) -> PodClient:
    return cluster.client(pod)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 600])
async def test_first_token_and_hand_off(pod: Pod, client: PodClient, length: int) -> None:
    sequence = spec([n % 500 for n in range(length)])
    response = await client.prefill(sequence)
    assert response.first_token.token_id == right_answer(sequence).output_ids[0]
    assert response.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    handoff = response.handoff
    assert (handoff.sequence_id, handoff.lease_id) == (sequence.sequence_id, sequence.sequence_id)
    assert (handoff.source_pod_id, handoff.source_epoch) == (pod.plan.pod_id, pod.plan.epoch)
    assert handoff.source_address == pod.address
    assert handoff.layout_fingerprint == pod.plan.layout.fingerprint
    assert handoff.num_tokens == length
    assert [len(group.blocks) for group in handoff.groups] == [-(-length // 16)]
    assert 0 < handoff.lease_remaining_ms <= LEASE_MS
    assert handoff.first_token == response.first_token
    assert pod.load().num_leases == 1
    assert pod.load().num_free_blocks == pod.load().num_blocks - -(-length // 16)
    assert await client.release_lease(handoff.lease_id, pod.plan.epoch)
    assert not await client.release_lease(handoff.lease_id, pod.plan.epoch)


async def test_a_hand_off_waits_for_no_step_after_its_own(
    pod: Pod, client: PodClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call to the engine is served between steps, and the next one may be a long prompt's."""
    calls: list[object] = []
    original = pod.engine.call

    async def call(command: Any) -> Any:
        calls.append(command)
        return await original(command)

    monkeypatch.setattr(pod.engine, "call", call)
    sequence = spec([1, 2, 3])
    response = await client.prefill(sequence)
    assert response.HasField("handoff")
    assert len(calls) == 1, "to add the sequence"
    assert await client.release_lease(sequence.sequence_id)


async def test_replayed_output_is_part_of_the_context(client: PodClient) -> None:
    whole = right_answer(spec([1, 2, 3])).output_ids
    response = await client.prefill(sequence := spec([1, 2, 3], whole[:5]))
    assert response.first_token.token_id == whole[5]
    assert response.handoff.num_tokens == 8
    assert await client.release_lease(sequence.sequence_id)


async def test_logprobs_come_with_the_first_token(client: PodClient) -> None:
    response = await client.prefill(sequence := spec([1, 2, 3], logprobs=2))
    token = response.first_token
    assert token.HasField("logprob")
    assert token.top_logprobs[0].token_id == token.token_id
    assert len(token.top_logprobs) == 2
    await client.release_lease(sequence.sequence_id)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 1}, common_pb2.FINISH_REASON_LENGTH),
        ({"stop_token_ids": [197]}, common_pb2.FINISH_REASON_STOP),
    ],
)
async def test_a_first_token_that_ends_the_answer_holds_nothing(
    pod: Pod, client: PodClient, fields: dict[str, Any], reason: common_pb2.FinishReason.ValueType
) -> None:
    response = await client.prefill(spec([65, 66], **fields))
    assert (response.first_token.token_id, response.finish_reason) == (197, reason)
    assert not response.HasField("handoff")
    await assert_idle(pod)


async def test_min_tokens_hold_back_the_stop(client: PodClient) -> None:
    response = await client.prefill(sequence := spec([65, 66], stop_token_ids=[197], min_tokens=2))
    assert response.first_token.token_id == 198  # the fake model passes over what may not be drawn
    assert response.HasField("handoff")
    await client.release_lease(sequence.sequence_id)


async def test_a_known_prefix_is_not_computed_again(client: PodClient) -> None:
    prompt = list(range(100))
    for expected in (0, 96):
        response = await client.prefill(sequence := spec(prompt))
        assert response.num_cached_tokens == expected
        await client.release_lease(sequence.sequence_id)


async def test_a_lease_that_nobody_renews_expires(pod: Pod, client: PodClient) -> None:
    await client.prefill(spec([1, 2, 3]), lease_ms=20)
    await assert_idle(pod)
    assert pod.metrics.registry.get_sample_value("pdserve_leases_expired_total") == 1


async def test_another_epoch_s_lease_is_not_released(pod: Pod, client: PodClient) -> None:
    await client.prefill(sequence := spec([1, 2, 3]))
    assert not await client.release_lease(sequence.sequence_id, "another")
    assert pod.load().num_leases == 1
    assert await client.release_lease(sequence.sequence_id)


async def test_release_of_a_running_prefill_ends_it(cluster: Cluster) -> None:
    pod = await cluster.start("prefill", fake_prefill_s_per_token=0.001, max_batched_tokens=64)
    client = cluster.client(pod)
    sequence = spec(range(400))
    call = asyncio.create_task(client.prefill(sequence))
    await until(lambda: pod.load().num_running == 1)
    assert await client.release_lease(sequence.sequence_id)
    with pytest.raises(Cancelled, match="released"):
        await call
    await assert_idle(pod)


@pytest.mark.parametrize("stage", ["queued", "prefilling"])
async def test_cancel_frees_everything(cluster: Cluster, stage: str) -> None:
    pod = await cluster.start("prefill", fake_prefill_s_per_token=0.001, max_num_seqs=1, max_batched_tokens=64)
    client = cluster.client(pod)
    calls = [asyncio.create_task(client.prefill(spec(range(300)))) for _ in range(3)]
    await until(lambda: (pod.load().num_running, pod.load().num_waiting) == (1, 2))
    for call in calls[1:] if stage == "queued" else calls:
        call.cancel()
    await asyncio.wait(calls)
    if stage == "queued":
        assert await client.release_lease(calls[0].result().handoff.lease_id)
    await assert_idle(pod)


async def test_an_answer_lost_to_a_cancel_can_be_released(pod: Pod, client: PodClient) -> None:
    """Cancels at many moments; whoever cancels also releases, and then nothing waits for a lease to expire."""
    for delay_ticks in range(12):
        sequence = spec([7, 8, delay_ticks])
        call = asyncio.create_task(client.prefill(sequence))
        for _ in range(delay_ticks):
            await asyncio.sleep(0.0005)
        call.cancel()
        await asyncio.wait([call])
        await client.release_lease(sequence.sequence_id)
        await assert_idle(pod)


async def test_the_same_sequence_twice_is_refused(client: PodClient) -> None:
    await client.prefill(sequence := spec([1, 2, 3]))
    with pytest.raises(InvalidRequest, match=r"sequence\.sequence_id"):
        await client.prefill(sequence)
    assert await client.release_lease(sequence.sequence_id)


@pytest.mark.parametrize(
    ("sequence", "lease_ms", "message"),
    [
        (spec([]), 1000, r"sequence\.prompt_token_ids"),
        (spec([1], temperature=-1.0), 1000, r"sequence\.sampling\.temperature"),
        (spec([1]), 0, "lease_ms"),
        (spec([1]), 3_600_000, "lease_ms"),
        (spec([1] * 2000), 1000, "cannot run on this pod.*slots"),
    ],
)
async def test_bad_requests_leave_the_pod_untouched(
    pod: Pod, client: PodClient, sequence: pods_pb2.SequenceSpec, lease_ms: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await client.prefill(sequence, lease_ms)
    await assert_idle(pod)
    assert pod.metrics.registry.get_sample_value("pdserve_tokens_total") == 0


async def test_bytes_that_are_no_request(pod: Pod) -> None:
    async with grpc.aio.insecure_channel(pod.address) as channel:
        prefill: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/pdserve.v1.PrefillPod/Prefill")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(b"\xff\xff\xff")
    assert isinstance(from_rpc(caught.value), InvalidRequest)
    await assert_idle(pod)


async def test_draining_refuses_new_work_and_keeps_leases(pod: Pod, client: PodClient) -> None:
    await client.prefill(sequence := spec([1, 2, 3]))
    drain = asyncio.create_task(pod.drain(timeout_s=60))
    with pytest.raises(PodUnavailable, match="draining"):
        await _until_refused(client)
    assert not drain.done()
    assert pod.load().num_leases == 1
    assert await client.release_lease(sequence.sequence_id)
    await asyncio.wait_for(drain, IDLE_S)


async def test_a_drain_ends_at_its_deadline(cluster: Cluster, pod: Pod, client: PodClient) -> None:
    await client.prefill(spec([1, 2, 3]))
    await asyncio.wait_for(pod.drain(timeout_s=0.05), IDLE_S)
    assert pod.load().num_leases == 1
    await cluster.stop(pod)


async def test_stop_fails_what_runs(cluster: Cluster) -> None:
    pod = await cluster.start("prefill", fake_prefill_s_per_token=0.001, max_batched_tokens=64)
    call = asyncio.create_task(cluster.client(pod).prefill(spec(range(400))))
    await until(lambda: pod.load().num_running == 1)
    await cluster.stop(pod)
    with pytest.raises(PodUnavailable, match="stopped"):
        await call


async def _until_refused(client: PodClient) -> None:
    while True:
        response = await client.prefill(spec([1], max_tokens=1))
        assert response.finish_reason
