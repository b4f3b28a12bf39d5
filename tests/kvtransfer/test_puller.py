"""Pulls: the right bytes in the right places, taking turns, or the right error.

A number in a test's name is that of its class of faults in the project's list of failures.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtransfer import peers
from kvtransfer.backends.inproc import Fault
from kvtransfer.lease import LeaseTable
from kvtransfer.puller import source_of
from proto import kv_pb2
from proto.errors import InternalError, LayoutMismatch, LeaseExpired, PeerLost
from tests.kvtransfer.pods import (
    LAYOUT,
    Pods,
    close_pods,
    fill,
    in_groups,
    make_endpoint,
    make_handoff,
    make_pods,
    notes,
    soon,
)

Release, Renew = kv_pb2.LeaseNotification.ACTION_RELEASE, kv_pb2.LeaseNotification.ACTION_RENEW


# --- what arrives ---


async def test_blocks_arrive_in_their_places(pods: Pods) -> None:
    result = await pods.puller.pull(make_handoff([7, 3, 20], 11), [5, 1, 9, 30], 0)
    assert result.bytes == 3 * LAYOUT.block_bytes
    assert pods.contents(5, 1, 9, 30) == [7, 3, 20, None]
    assert await notes(pods, 1) == [(Release, "lease")]


@pytest.mark.parametrize(("cached", "expected"), [(4, [None, 3, 20]), (7, [None, 3, 20]), (8, [None, None, 20])])
async def test_2_a_cached_prefix_is_not_read(pods: Pods, cached: int, expected: list[int | None]) -> None:
    result = await pods.puller.pull(make_handoff([7, 3, 20], 11), [5, 1, 9], cached)
    assert pods.contents(5, 1, 9) == expected
    assert result.bytes == sum(e is not None for e in expected) * LAYOUT.block_bytes
    assert await notes(pods, 1) == [(Release, "lease")]


async def test_1_nothing_to_read_and_still_the_lease_is_released(pods: Pods) -> None:
    result = await pods.puller.pull(make_handoff([7, 3, 20], 11), [5, 1, 9], 11)
    assert result.bytes == 0
    assert pods.contents(5, 1, 9) == [None, None, None]
    assert await notes(pods, 1) == [(Release, "lease")]


async def test_layer_groups_are_put_together(pods: Pods) -> None:
    await pods.puller.pull(in_groups(make_handoff([7, 3], 8)), [5, 1], 0)
    assert pods.contents(5, 1, 0) == [7, 3, None]


async def test_the_next_pull_uses_the_same_connection(pods: Pods) -> None:
    await pods.puller.pull(make_handoff([7], 4), [5], 0)
    pods.answer = None
    await pods.puller.pull(make_handoff([8], 4), [6], 0)
    assert pods.contents(5, 6) == [7, 8]


async def test_connecting_ahead_leaves_the_first_pull_only_the_read(pods: Pods) -> None:
    fetched = asyncio.Event()
    original = pods.fetch

    async def told(address: str) -> kv_pb2.GetAgentMetadataResponse:
        fetched.set()
        return await original(address)

    pods.fetch = told  # type: ignore[method-assign]  # a spy
    pods.puller.connect(source_of(make_handoff([], 0)))
    await fetched.wait()
    pods.answer = None  # a second attempt would fail
    await pods.puller.pull(make_handoff([7], 4), [5], 0)
    assert pods.contents(5) == [7]


async def test_connecting_ahead_in_vain_is_reported_by_the_pull(pods: Pods) -> None:
    pods.answer = None
    pods.puller.connect(source_of(make_handoff([], 0)))
    with pytest.raises(PeerLost):
        await pods.puller.pull(make_handoff([7], 4), [5], 0)


async def test_concurrent_first_pulls_connect_once(pods: Pods) -> None:
    calls = 0
    original = pods.fetch

    async def counted(address: str) -> kv_pb2.GetAgentMetadataResponse:
        nonlocal calls
        calls += 1
        return await original(address)

    pods.fetch = counted  # type: ignore[method-assign]  # a spy
    await asyncio.gather(*(pods.puller.pull(make_handoff([b], 4), [b + 10], 0) for b in range(6)))
    assert pods.contents(*range(10, 16)) == list(range(6))
    assert calls == 1


async def test_peers_not_used_for_long_are_forgotten(
    faulty: Pods, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods come and go for hours; what is kept of them must not grow."""
    monkeypatch.setattr(peers, "MAX_PEERS", 2)
    known = [f"prefill/{epoch}" for epoch in ("e1", "other-1", "other-2")]
    for number in range(3):
        handoff = make_handoff([7], 4)
        if number:
            faulty.prefill.close()
            handoff.source_pod_id, handoff.source_epoch = f"pod-{number}", "e"
            faulty.prefill = faulty.answer = make_endpoint(f"pod-{number}", "inproc", runtime_dir, "e")
            fill(faulty.prefill)
            known[number] = f"pod-{number}/e"
        await faulty.puller.pull(handoff, [number], 0)
    assert [faulty.decode.agent.check_remote_metadata(name) for name in known] == [False, True, True]


# --- generations, epochs, layouts ---


async def test_a_reused_block_is_noticed(pods: Pods) -> None:
    pods.prefill.generations[3] += 1
    with pytest.raises(
        LeaseExpired, match="block 3 of pod 'prefill' has generation 1004, the hand-off named 1003"
    ) as e:
        await pods.puller.pull(make_handoff([7, 3], 8), [5, 1], 0)
    assert e.value.pod_id == "prefill"
    assert (await pods.puller.pull(make_handoff([7, 3], 8), [5, 1], 8)).bytes == 0  # cached: nobody looks at it


async def test_a_reused_block_in_the_cached_prefix_does_not_matter(pods: Pods) -> None:
    pods.prefill.generations[7] += 1
    await pods.puller.pull(make_handoff([7, 3], 8), [5, 1], 4)
    assert pods.contents(1) == [3]


async def test_7_the_lease_expires_during_the_read(faulty: Pods) -> None:
    """The owner takes the blocks back while the read is stalled (14: the reader was stopped, say); then it lands."""
    leases = LeaseTable()
    leases.grant("lease", 0.0, 2.0)
    faulty.faults.plan[0] = Fault.LATE
    pull = asyncio.create_task(faulty.puller.pull(make_handoff([7, 3], 8), [5, 1], 0))
    await soon(lambda: faulty.faults.stalled)
    assert leases.expire(2.0) == ["lease"]
    faulty.prefill.generations[7] += 1
    faulty.prefill.kv_memory.reshape(32, -1)[7] = 99
    faulty.faults.land(0)
    with pytest.raises(LeaseExpired, match="block 7"):
        await pull
    assert not leases.release("lease")  # the late RELEASE frees nothing


async def test_the_generations_are_read_after_the_data(faulty: Pods) -> None:
    """A change between the two reads is caught; were they read first, it would not be."""
    faulty.faults.plan[1] = Fault.LATE  # the second post: the generations
    pull = asyncio.create_task(faulty.puller.pull(make_handoff([7], 4), [5], 0))
    await soon(lambda: faulty.faults.stalled)
    assert faulty.contents(5) == [7]
    faulty.prefill.generations[7] += 1
    faulty.faults.land(1)
    with pytest.raises(LeaseExpired):
        await pull


async def test_13_a_restarted_pod(pods: Pods, runtime_dir: Path) -> None:
    await pods.puller.pull(make_handoff([7], 4), [5], 0)
    pods.prefill.close()
    again = make_endpoint("prefill", pods.prefill.backend, runtime_dir, "e2")
    fill(again)
    again.kv_memory[:] += 100
    pods.prefill = pods.answer = again
    with pytest.raises((LeaseExpired, PeerLost)):  # the old link is noticed to be dead
        await pods.puller.pull(make_handoff([7], 4), [6], 0)
    with pytest.raises(LeaseExpired, match="epoch 'e1' is gone: address is pod 'prefill' epoch 'e2'"):
        await pods.puller.pull(make_handoff([7], 4), [6], 0)
    assert pods.contents(6) == [None]
    await pods.puller.pull(make_handoff([7], 4, epoch="e2"), [6], 0)
    assert pods.contents(6) == [107]
    assert await notes(pods, 1) == [(Release, "lease")]


async def test_13_a_restarted_pod_ignores_what_was_meant_for_its_predecessor(pods: Pods) -> None:
    await pods.puller.pull(make_handoff([7], 4), [5], 0)
    await notes(pods, 1)
    peer = pods.prefill.agent.name
    for epoch in ("e0", ""):
        message = kv_pb2.LeaseNotification(action=Release, lease_id="old", owner_epoch=epoch)
        pods.decode.agent.send_notif(peer, message.SerializeToString())
    pods.decode.agent.send_notif(peer, b"\xff\xff garbage")
    message = kv_pb2.LeaseNotification(action=Release, lease_id="new", owner_epoch="e1")
    pods.decode.agent.send_notif(peer, message.SerializeToString())
    assert await notes(pods, 1) == [(Release, "new")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 8}, "block_size 4 != 8"),
        ({"dtype": "float32"}, "dtype int64 != float32"),
        ({"kv_dtype": "int8", "block_bytes": 192}, "kv_dtype int64 != int8"),
        ({"num_kv_heads": 2}, "num_kv_heads 1 != 2"),
        ({"head_dim": 8}, "head_dim 4 != 8"),
        ({"num_layers": 1}, "num_layers 2 != 1"),
        ({"weights_revision": "q"}, "weights_revision r != q"),
        ({"model_id": "n"}, "model_id m != n"),
        ({"layout_version": 3}, "layout_version 2 != 3"),
    ],
)
async def test_15_layouts_that_differ(
    faulty: Pods, runtime_dir: Path, change: dict[str, int | str], words: str
) -> None:
    layout = replace(LAYOUT, **change)  # type: ignore[arg-type]  # the fields' own types
    with make_endpoint("prefill", "inproc", runtime_dir, "e1", layout) as other:
        faulty.answer = other
        handoff = make_handoff([7], 4, layout=layout)
        with pytest.raises(LayoutMismatch, match=words):
            await faulty.puller.pull(handoff, [5], 0)
        assert faulty.contents(5) == [None]
        await soon(lambda: [n.lease_id for n in other.poll_notifications()] == ["lease"])


async def test_15_a_handoff_that_contradicts_its_pod(faulty: Pods) -> None:
    handoff = make_handoff([7], 4)
    handoff.layout_fingerprint = "0" * 32
    with pytest.raises(LayoutMismatch, match="layout_fingerprint"):
        await faulty.puller.pull(handoff, [5], 0)


@pytest.mark.parametrize("block", [-1, 32, 2**31 - 1])
async def test_a_block_that_the_source_does_not_have(faulty: Pods, block: int) -> None:
    handoff = make_handoff([7], 4)
    handoff.groups[0].blocks[0].block_id = block
    with pytest.raises(InternalError, match=f"block_id = {block}"):
        await faulty.puller.pull(handoff, [5], 0)


@pytest.mark.parametrize("block", [-1, 32])
async def test_a_local_block_that_is_not_ours(faulty: Pods, block: int) -> None:
    with pytest.raises(InternalError, match="must be ours"):
        await faulty.puller.pull(make_handoff([7], 4), [block], 0)


# --- turns, leases ---


async def test_pulls_take_turns_in_order(faulty: Pods) -> None:
    faulty.faults.plan.update({0: Fault.LATE, 1: Fault.LATE})
    order: list[int] = []

    async def pull(block: int) -> None:
        await faulty.puller.pull(make_handoff([block], 4), [block], 0)
        order.append(block)

    tasks = [asyncio.create_task(pull(block)) for block in range(10)]
    await soon(lambda: len(faulty.faults.stalled) == 2)
    assert faulty.puller.num_transfers == 10
    faulty.puller.check_invariants()
    faulty.faults.land(0)  # one slot is free again; block 1 keeps the other
    await soon(lambda: len(order) == 9)
    assert order == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    faulty.faults.land(1)
    await asyncio.gather(*tasks)
    assert faulty.contents(*range(10)) == list(range(10))


async def test_a_block_cannot_be_in_two_pulls(faulty: Pods) -> None:
    faulty.faults.plan[0] = Fault.LATE
    first = asyncio.create_task(faulty.puller.pull(make_handoff([7], 4), [5], 0))
    await soon(lambda: faulty.faults.stalled)
    with pytest.raises(InternalError, match=r"local blocks \[5\]"):
        await faulty.puller.pull(make_handoff([8, 9], 8), [6, 5], 0)
    faulty.faults.land(0)
    await first


async def test_the_lease_is_renewed_in_line_and_in_transfer(faulty: Pods) -> None:
    faulty.faults.plan.update({0: Fault.LATE, 1: Fault.LATE})
    pulls = []
    for block in (1, 2, 3):
        handoff = make_handoff([block], 4, lease_ms=600)
        handoff.lease_id = f"lease-{block}"
        pulls.append(asyncio.create_task(faulty.puller.pull(handoff, [block], 0)))
    await soon(lambda: len(faulty.faults.stalled) == 2)
    seen: set[tuple[int, str]] = set()
    while len(seen) < 3:
        seen.update(await notes(faulty, 1))
    assert seen == {(Renew, f"lease-{block}") for block in (1, 2, 3)}
    for post in (0, 1):
        faulty.faults.land(post)
    await asyncio.gather(*pulls)
    while not seen >= {(Release, f"lease-{block}") for block in (1, 2, 3)}:
        seen.update(await notes(faulty, 1))


async def test_after_close_nothing_is_pulled(runtime_dir: Path, no_leaked_tasks: None) -> None:
    pods = make_pods("shm", runtime_dir)
    await pods.puller.pull(make_handoff([7], 4), [5], 0)
    await close_pods(pods)
    with pytest.raises(InternalError, match="closed"):
        await pods.puller.pull(make_handoff([7], 4), [5], 0)


async def test_nothing_leaks_over_many_mixed_pulls(faulty: Pods) -> None:
    """Random faults, cancellations and stale generations; in the end everything is back, and what was said is true."""
    rng = np.random.default_rng(5)
    faulty.faults.plan.update({k: list(Fault)[rng.integers(3)] for k in range(400) if rng.random() < 0.2})

    async def one(number: int) -> None:
        block, local = int(rng.integers(0, 16)), number % 16 + 16
        task = asyncio.create_task(faulty.puller.pull(make_handoff([block], 4), [local], 0))
        if rng.random() < 0.2:
            await asyncio.sleep(0)
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(result, (PeerLost, asyncio.CancelledError)) or faulty.contents(local) == [block], result

    for start in range(0, 96, 16):
        await asyncio.gather(*(one(number) for number in range(start, start + 16)))
        faulty.puller.check_invariants()
    assert faulty.puller.num_transfers == 0
