"""Prefill pod, transfer, decode pod: the whole hand-off over real channels, and the ways in which it goes wrong.

The numbers are those of the fault list the design names (shared FAILURES.md).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from kvtransfer.backends.inproc import Fault, Faults, InprocBackend
from pod.pod import Pod
from prefill_service.servicer import PrefillService
from proto import common_pb2, pods_pb2
from proto.errors import LayoutMismatch, LeaseExpired, PdserveError, PeerLost, TransferFailed
from tests.support.cluster import IDLE_S, Cluster, assert_idle, tokens_of
from tests.support.pod_client import PodClient, continued, generate, hand_over, right_answer, spec
from tests.support.polling import until

ENDLESS: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": []}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode pod with a client each."""

    prefill_pod: Pod
    decode_pod: Pod
    prefill: PodClient
    decode: PodClient

    @property
    def fingerprint(self) -> str:
        return self.decode_pod.plan.layout.fingerprint

    async def generate(self, sequence: pods_pb2.SequenceSpec) -> list[int]:
        return await generate(sequence, self.prefill, self.decode, self.fingerprint)

    async def hand_over(self, sequence: pods_pb2.SequenceSpec) -> pods_pb2.PrefillResponse:
        return await hand_over(sequence, self.prefill, self.decode, self.fingerprint)

    def error(self, sequence: pods_pb2.SequenceSpec) -> PdserveError | None:
        return self.decode.received[sequence.sequence_id].error()

    async def until_ended(self, sequence: pods_pb2.SequenceSpec) -> None:
        await self.decode.received[sequence.sequence_id].until_ended()

    async def assert_idle(self) -> None:
        await assert_idle(self.prefill_pod)
        await assert_idle(self.decode_pod)

    @property
    def faults(self) -> Faults:
        """Of the decode pod's reads: each pull posts the data, then the generation numbers."""
        backend = self.decode_pod.endpoint.agent.backends["inproc"]
        assert isinstance(backend, InprocBackend)
        return backend.faults

    @property
    def num_reserved(self) -> int:
        return self.decode_pod.engine.load.num_reserved


async def make_pair(cluster: Cluster, *, prefill: dict[str, object] | None = None, **decode: object) -> Pair:
    prefill_pod, decode_pod = await cluster.start("prefill", **(prefill or {})), await cluster.start("decode", **decode)
    return Pair(prefill_pod, decode_pod, cluster.client(prefill_pod), await cluster.decode_client(decode_pod))


@pytest.fixture
async def pair(cluster: Cluster) -> Pair:
    return await make_pair(cluster)


def answer(sequence: pods_pb2.SequenceSpec) -> list[int]:
    return list(right_answer(sequence).output_ids)


@pytest.mark.parametrize("backend", ["inproc", "shm"])
async def test_the_answer_is_the_fake_model_s(cluster: Cluster, backend: str) -> None:
    pair = await make_pair(cluster, prefill={"transfer_backend": backend}, transfer_backend=backend)
    for length in (1, 15, 16, 17, 31, 32, 33, 100, 511, 513):
        sequence = spec([(n * 7 + length) % 500 for n in range(length)], max_tokens=24)
        assert await pair.generate(sequence) == answer(sequence)


async def test_seeded_draws_do_not_depend_on_the_path(pair: Pair) -> None:
    sequence = spec([3, 1, 4, 1, 5], temperature=0.8, seed=42, max_tokens=30, **ENDLESS)
    assert await pair.generate(sequence) == answer(sequence)
    alone = spec([3, 1, 4, 1, 5], temperature=0.8, seed=42, max_tokens=30, **ENDLESS)
    await pair.decode.start_decode(alone)
    await pair.until_ended(alone)
    assert pair.decode.received[alone.sequence_id].token_ids == answer(sequence)


async def test_timings_and_bytes_of_the_first_message(pair: Pair) -> None:
    await pair.generate(sequence := spec(range(100)))
    first = pair.decode.received[sequence.sequence_id].messages[0]
    assert first.timings.transfer_s > 0
    assert first.timings.first_step_s > 0
    assert first.timings.prefill_s == 0
    assert first.timings.transfer_bytes == 7 * pair.decode_pod.plan.layout.block_bytes


async def test_replayed_output_travels_through_a_hand_off(pair: Pair) -> None:
    whole = answer(spec([9, 8, 7], max_tokens=12, **ENDLESS))
    sequence = spec([9, 8, 7], whole[:5], max_tokens=12, **ENDLESS)
    assert await pair.generate(sequence) == whole


async def test_a_stop_on_the_first_token_needs_no_decode(pair: Pair) -> None:
    sequence = spec([65, 66], stop_token_ids=[197])
    assert await pair.generate(sequence) == [197]
    await pair.assert_idle()


# 1, 2: what the decode pod has already is not transferred, and the prefill pod is told in any case.


async def test_1_nothing_to_pull_still_releases_the_lease(pair: Pair) -> None:
    prompt = list(range(96))
    assert await pair.generate(first := spec(prompt)) == answer(first)
    longer = spec(prompt)  # all full blocks of the prompt are cached on the decode pod now
    assert await pair.generate(longer) == answer(longer)
    message = pair.decode.received[longer.sequence_id].messages[0]
    assert message.num_cached_tokens == 96
    assert message.timings.transfer_bytes == 0
    await pair.assert_idle()


@pytest.mark.parametrize(("shared", "length"), [(32, 100), (48, 50), (96, 112)])
async def test_2_only_the_tail_is_pulled(pair: Pair, shared: int, length: int) -> None:
    head = list(range(shared))
    await pair.generate(spec([*head, 400, 401]))
    sequence = spec([*head, *range(300, 300 + length - shared)])
    assert await pair.generate(sequence) == answer(sequence)
    message = pair.decode.received[sequence.sequence_id].messages[0]
    assert message.num_cached_tokens == shared
    assert message.timings.transfer_bytes == (-(-length // 16) - shared // 16) * pair.decode_pod.plan.layout.block_bytes


async def test_3_a_refusal_frees_the_prefill_side_at_once(cluster: Cluster) -> None:
    pair = await make_pair(cluster)
    response = await pair.prefill.prefill(sequence := spec(range(50)))
    with pytest.raises(LeaseExpired, match="credit_id"):
        await pair.decode.start_decode(continued(sequence, response), response.handoff, sequence.sequence_id)
    assert await pair.prefill.release_lease(sequence.sequence_id)
    await pair.assert_idle()


# 4, 5, 8: leaving in the middle.


async def test_4_abort_while_connecting(cluster: Cluster) -> None:
    """The source never answers."""
    connections: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda reader, writer: connections.append(writer), "127.0.0.1", 0)
    pair = await make_pair(cluster)
    credit = await pair.decode.reserve(sequence := spec(range(50)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence)
    response.handoff.source_address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    assert pair.decode_pod.load().num_transfers == 1
    assert await pair.decode.abort(sequence.sequence_id)
    await assert_idle(pair.decode_pod)
    assert await pair.prefill.release_lease(sequence.sequence_id)
    silent.close()
    for connection in connections:
        connection.close()
        await connection.wait_closed()


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.LATE])
async def test_4_and_8_abort_in_flight_quarantines_until_settled(pair: Pair, fault: Fault) -> None:
    pair.faults.plan = {0: fault}
    await pair.hand_over(sequence := spec(range(50)))
    await until(lambda: bool(pair.faults.stalled))
    assert await pair.decode.abort(sequence.sequence_id)
    if fault is Fault.LATE:  # it cannot be stopped: the blocks stay until its bytes have landed
        await pair.decode_pod.check_invariants()
        assert pair.num_reserved == 1
        pair.faults.land(0)
    await pair.assert_idle()
    assert pair.num_reserved == 0
    again = spec(range(50))
    assert await pair.generate(again) == answer(again)


@pytest.mark.parametrize("index", [0, 1])
async def test_8_a_failed_read_is_told_and_frees_everything(pair: Pair, index: int) -> None:
    pair.faults.plan = {index: Fault.FAIL}
    await pair.hand_over(sequence := spec(range(50)))
    await pair.until_ended(sequence)
    assert isinstance(pair.error(sequence), PeerLost)
    assert pair.decode.received[sequence.sequence_id].token_ids == []
    await assert_idle(pair.decode_pod)
    assert await pair.prefill.release_lease(sequence.sequence_id)  # as a router does when a hand-off came to nothing


async def test_5_the_end_of_the_stream_during_a_transfer(pair: Pair) -> None:
    pair.faults.plan = {0: Fault.LATE}
    await pair.hand_over(spec(range(50)))
    await until(lambda: bool(pair.faults.stalled))
    await pair.decode.close_stream()
    await until(lambda: not tokens_of(pair.decode_pod).streams)
    assert pair.num_reserved == 1
    pair.faults.land(0)
    await pair.assert_idle()


async def test_4_cancel_and_abort_at_many_moments(pair: Pair) -> None:
    """Whatever stage it hits, both pods come back to rest at once."""
    for ticks in range(25):
        sequence = spec(range(ticks, ticks + 60), max_tokens=200, **ENDLESS)
        request = asyncio.create_task(pair.generate(sequence))
        for _ in range(ticks):
            await asyncio.sleep(0.0005)
        request.cancel()
        await asyncio.wait([request])
        await pair.prefill.release_lease(sequence.sequence_id)
        await pair.decode.abort(sequence.sequence_id)
        await asyncio.wait_for(pair.decode_pod.role.drained(), IDLE_S)
        await asyncio.wait_for(pair.prefill_pod.role.drained(), IDLE_S)
    await pair.assert_idle()


# 6, 7: KV that is gone.


async def test_6_preempted_after_the_hand_off_recomputes_locally(cluster: Cluster) -> None:
    pair = await make_pair(cluster, num_blocks=10)
    sequences = [spec([n] * 20, max_tokens=60, **ENDLESS) for n in range(1, 5)]
    answers = await asyncio.gather(*(pair.generate(sequence) for sequence in sequences))
    assert answers == [answer(sequence) for sequence in sequences]
    assert sum(pair.decode.received[s.sequence_id].last.num_preemptions for s in sequences) > 0


@pytest.mark.parametrize("reused", [False, True])
async def test_7_a_lease_that_expired_before_the_transfer(cluster: Cluster, reused: bool) -> None:
    """The blocks' generations decide: as long as nobody else got the blocks, the bytes are still the right ones."""
    pair = await make_pair(cluster, prefill={"num_blocks": 8})
    credit = await pair.decode.reserve(sequence := spec(range(100)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence, lease_ms=10)
    await assert_idle(pair.prefill_pod)
    if reused:
        await pair.prefill.prefill(other := spec(range(300, 420)))
        await pair.prefill.release_lease(other.sequence_id)
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await pair.until_ended(sequence)
    if reused:
        assert isinstance(pair.error(sequence), LeaseExpired)
        assert pair.decode.received[sequence.sequence_id].token_ids == []
    else:
        assert [response.first_token.token_id, *pair.decode.received[sequence.sequence_id].token_ids] == answer(
            sequence
        )
    again = spec(range(100))
    assert await pair.generate(again) == answer(again)


def lease_end(pod: Pod) -> float:
    """Of its only lease, in seconds of its clock."""
    assert isinstance(pod.role, PrefillService)
    (entry,) = pod.role.table.entries()
    return pod.role.table.lease_remaining_s(entry, now=0)


async def test_7_a_lease_is_renewed_while_its_transfer_takes_long(pair: Pair) -> None:
    pair.faults.plan = {0: Fault.STALL}
    credit = await pair.decode.reserve(sequence := spec(range(50)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence, lease_ms=2000)
    granted_until = lease_end(pair.prefill_pod)
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await until(lambda: lease_end(pair.prefill_pod) > granted_until)
    pair.faults.land(0)
    await pair.until_ended(sequence)
    assert [response.first_token.token_id, *pair.decode.received[sequence.sequence_id].token_ids] == answer(sequence)


# 9, 11, 13, 15, 17.


async def test_9_a_source_that_cannot_be_reached(cluster: Cluster, pair: Pair) -> None:
    credit = await pair.decode.reserve(sequence := spec(range(50)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence)
    await cluster.kill(pair.prefill_pod)
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await pair.until_ended(sequence)
    error = pair.error(sequence)
    assert isinstance(error, PeerLost)
    assert error.pod_id == pair.prefill_pod.plan.pod_id
    await assert_idle(pair.decode_pod)


async def test_11_more_hand_offs_than_slots(cluster: Cluster) -> None:
    pair = await make_pair(cluster, num_blocks=24, max_num_seqs=4)
    sequences = [spec(range(n, n + 70), max_tokens=10, **ENDLESS) for n in range(30)]
    answers = await asyncio.gather(*(pair.generate(sequence) for sequence in sequences))
    assert answers == [answer(sequence) for sequence in sequences]


async def test_10_odd_ids_do_not_meet(pair: Pair) -> None:
    """Keys are the whole id, whatever characters it has."""
    ids = ["a", "a.0", "a/0", "a b", "a\n", "ä", "a:*", "😀", "a\x00"]
    sequences = []
    for number, name in enumerate(ids):
        sequences.append(sequence := spec([number, 5]))
        sequence.sequence_id = name
    answers = await asyncio.gather(*(pair.generate(sequence) for sequence in sequences))
    assert answers == [answer(sequence) for sequence in sequences]


async def test_13_nothing_of_an_old_epoch_is_accepted(cluster: Cluster, pair: Pair) -> None:
    assert await pair.generate(before := spec(range(20))) == answer(before)
    credit = await pair.decode.reserve(sequence := spec(range(50)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence)
    await cluster.kill(pair.prefill_pod)
    fresh = await cluster.start(
        "prefill", port=pair.prefill_pod.server.port, pod_id=pair.prefill_pod.plan.pod_id, num_blocks=64
    )
    assert fresh.plan.epoch != pair.prefill_pod.plan.epoch
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await pair.until_ended(sequence)
    assert isinstance(pair.error(sequence), TransferFailed)
    client = cluster.client(fresh)
    assert not await client.release_lease(sequence.sequence_id, pair.prefill_pod.plan.epoch)
    after = spec(range(50))
    assert await generate(after, client, pair.decode, pair.fingerprint) == answer(after)


async def test_15_unlike_layouts_are_refused_by_name(cluster: Cluster) -> None:
    pair = await make_pair(cluster, prefill={"block_size": 32})
    other = pair.prefill_pod.plan.layout.fingerprint
    with pytest.raises(LayoutMismatch, match="layout_fingerprint"):
        await pair.decode.reserve(spec([1]), other)
    credit = await pair.decode.reserve(sequence := spec(range(10)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence)
    with pytest.raises(LayoutMismatch, match="layout_fingerprint"):
        await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    response.handoff.layout_fingerprint = pair.fingerprint  # a lie, found out when the two pods meet
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await pair.until_ended(sequence)
    error = pair.error(sequence)
    assert isinstance(error, LayoutMismatch)
    assert "block_size" in error.message
    await pair.assert_idle()


async def test_17_a_draining_prefill_pod_keeps_what_it_leased(pair: Pair) -> None:
    credit = await pair.decode.reserve(sequence := spec(range(50)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence)
    drain = asyncio.create_task(pair.prefill_pod.drain(timeout_s=60))
    await asyncio.sleep(0)
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await pair.until_ended(sequence)
    assert pair.decode.received[sequence.sequence_id].last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    await asyncio.wait_for(drain, IDLE_S)


async def test_17_a_draining_decode_pod_honours_its_credits(pair: Pair) -> None:
    credit = await pair.decode.reserve(sequence := spec(range(50)), pair.fingerprint)
    response = await pair.prefill.prefill(sequence)
    drain = asyncio.create_task(pair.decode_pod.drain(timeout_s=60))
    await asyncio.sleep(0)
    await pair.decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await pair.until_ended(sequence)
    assert [response.first_token.token_id, *pair.decode.received[sequence.sequence_id].token_ids] == answer(sequence)
    await asyncio.wait_for(drain, IDLE_S)
