"""Pulls from pods that are gone or sick, and pulls that are cancelled: no byte lands after a pull is over."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtransfer.backends.inproc import Fault
from kvtransfer.errors import nixlRemoteDisconnectError
from kvtransfer.handles import XferHandle
from kvtransfer.puller import Puller
from proto import kv_pb2
from proto.errors import PeerLost, PodUnavailable
from tests.kvtransfer.pods import (
    Pods,
    close_pods,
    in_groups,
    make_handoff,
    make_pods,
    notes,
    soon,
)

Release, Renew = kv_pb2.LeaseNotification.ACTION_RELEASE, kv_pb2.LeaseNotification.ACTION_RENEW


# --- peers that are gone or sick ---


async def test_9_a_pod_that_cannot_be_reached(pods: Pods) -> None:
    pods.answer = None
    with pytest.raises(PeerLost, match="no route") as error:
        await pods.puller.pull(make_handoff([7], 4), [5], 0)
    assert error.value.pod_id == "prefill"
    pods.answer = pods.prefill
    await pods.puller.pull(make_handoff([7], 4), [5], 0)  # a failure is not remembered
    assert pods.contents(5) == [7]


async def test_9_a_pod_that_never_answers(runtime_dir: Path, no_leaked_tasks: None) -> None:
    pods = make_pods("inproc", runtime_dir)
    pods.answer = asyncio.Event()
    impatient = Puller(pods.decode, pods.fetch, timeout_s=0.01)
    with pytest.raises(PeerLost, match="no answer"):
        await impatient.pull(make_handoff([7], 4), [5], 0)
    impatient.check_invariants()
    await impatient.close()
    await close_pods(pods)


@pytest.mark.parametrize("error", [PodUnavailable("draining"), OSError("refused")])
async def test_errors_of_the_side_channel(faulty: Pods, error: Exception) -> None:
    async def fail(address: str) -> kv_pb2.GetAgentMetadataResponse:
        raise error

    faulty.fetch = fail  # type: ignore[method-assign]  # a fault
    with pytest.raises(PeerLost, match=str(error)):
        await faulty.puller.pull(make_handoff([7], 4), [5], 0)


@pytest.mark.parametrize(
    "change", [{"num_blocks": 0}, {"block_bytes": 7}, {"kv_base_address": 2**64 - 5}, {"agent_metadata": b"x"}]
)
async def test_nonsense_from_the_side_channel(faulty: Pods, change: dict[str, object]) -> None:
    async def lie(address: str) -> kv_pb2.GetAgentMetadataResponse:
        answer = faulty.prefill.describe()
        for name, value in change.items():
            setattr(answer, name, value)
        return answer

    faulty.fetch = lie  # type: ignore[method-assign]  # a fault
    with pytest.raises(PeerLost):
        await faulty.puller.pull(make_handoff([7], 4), [5], 0)


async def test_a_pod_that_dies_between_two_pulls(pods: Pods) -> None:
    await pods.puller.pull(make_handoff([7], 4), [5], 0)
    await notes(pods, 1)
    pods.prefill.close()
    pods.answer = None
    with pytest.raises(PeerLost) as error:
        await pods.puller.pull(make_handoff([8], 4), [6], 0)
    assert error.value.pod_id == "prefill"


async def test_8_one_read_fails_while_its_sibling_still_writes(faulty: Pods) -> None:
    faulty.faults.plan.update({0: Fault.LATE, 1: Fault.FAIL})
    pull = asyncio.create_task(faulty.puller.pull(in_groups(make_handoff([7, 3], 8)), [5, 1], 0))
    await soon(lambda: faulty.faults.num_posts == 2)
    for _ in range(50):  # less than settle_s of its clock
        await asyncio.sleep(0)
        assert not pull.done()
        assert faulty.puller.quarantined_block_ids == {5, 1}
    faulty.faults.land(0)
    with pytest.raises(PeerLost, match="fails as planned"):
        await pull
    assert faulty.puller.quarantined_block_ids == frozenset()


async def test_8_a_failure_stops_the_siblings_at_once(faulty: Pods) -> None:
    faulty.faults.plan.update({0: Fault.STALL, 1: Fault.FAIL})
    with pytest.raises(PeerLost, match="fails as planned"):
        await faulty.puller.pull(in_groups(make_handoff([7, 3], 8)), [5, 1], 0)
    assert faulty.clock.now < 1.0  # not after the 5 s that a stalled read may take


async def test_a_read_that_stalls_is_given_up_in_time(faulty: Pods) -> None:
    faulty.faults.plan[0] = Fault.STALL
    with pytest.raises(PeerLost, match=r"did not finish within 5\.0 s"):
        await faulty.puller.pull(make_handoff([7], 4), [5], 0)
    assert 5.0 <= faulty.clock.now < 5.5
    assert faulty.faults.stalled == {}
    assert faulty.contents(5) == [None]


async def test_a_read_that_cannot_be_cancelled_is_cut_off(faulty: Pods) -> None:
    faulty.faults.plan[0] = Fault.LATE
    with pytest.raises(PeerLost, match="did not finish"):
        await faulty.puller.pull(make_handoff([7], 4), [5], 0)
    assert 6.0 <= faulty.clock.now < 6.5  # timeout_s, then settle_s
    assert faulty.faults.stalled == {}  # the link is gone, so it can never land
    await faulty.puller.pull(make_handoff([7], 4), [5], 0)  # the next one connects again
    assert faulty.contents(5) == [7]


async def test_a_sick_pod_delays_no_pull_from_a_healthy_one(faulty: Pods, runtime_dir: Path) -> None:
    """It is waited for before a slot is taken."""
    await faulty.puller.pull(make_handoff([7], 4), [5], 0)
    never = faulty.answer = asyncio.Event()
    sick = []
    for i in range(4):
        handoff = make_handoff([i], 4)
        handoff.source_pod_id = "sick"
        sick.append(asyncio.create_task(faulty.puller.pull(handoff, [10 + i], 0)))
    await soon(lambda: faulty.puller.num_transfers == 4)
    await faulty.puller.pull(make_handoff([8], 4), [6], 0)
    assert faulty.contents(6) == [8]
    never.set()
    assert all(isinstance(r, PeerLost) for r in await asyncio.gather(*sick, return_exceptions=True))


# --- cancellation ---


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_4_cancelled_while_connecting(faulty: Pods) -> None:
    gate = faulty.answer = asyncio.Event()
    pull = asyncio.create_task(faulty.puller.pull(make_handoff([7], 4), [5], 0))
    await soon(lambda: faulty.puller.num_transfers == 1)
    await cancelled(pull)
    faulty.answer = faulty.prefill
    gate.set()


async def test_4_cancelled_in_line(faulty: Pods) -> None:
    faulty.faults.plan.update({0: Fault.LATE, 1: Fault.LATE})
    running = [asyncio.create_task(faulty.puller.pull(make_handoff([b], 4), [b], 0)) for b in (7, 8)]
    await soon(lambda: len(faulty.faults.stalled) == 2)
    waiting = asyncio.create_task(faulty.puller.pull(make_handoff([9], 4), [9], 0))
    await soon(lambda: faulty.puller.num_transfers == 3)
    await cancelled(waiting)
    assert await notes(faulty, 1) == [(Release, "lease")]
    for post in (0, 1):
        faulty.faults.land(post)
    await asyncio.gather(*running)
    assert faulty.contents(7, 8, 9) == [7, 8, None]


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.LATE])
async def test_4_cancelled_while_reading(faulty: Pods, fault: Fault) -> None:
    """However often it is cancelled, it ends only when nothing can land any more."""
    faulty.faults.plan[0] = fault
    pull = asyncio.create_task(faulty.puller.pull(make_handoff([7], 4), [5], 0))
    await soon(lambda: faulty.faults.stalled)
    assert faulty.puller.quarantined_block_ids == {5}
    for _ in range(20):
        pull.cancel()
        await asyncio.sleep(0)
        assert not pull.done() or fault is Fault.STALL
    if fault is Fault.LATE:
        assert faulty.puller.quarantined_block_ids == {5}
        faulty.faults.land(0)
    await cancelled(pull)
    before = faulty.contents(5)
    for post in list(faulty.faults.stalled):
        faulty.faults.land(post)
    assert faulty.contents(5) == before
    assert await notes(faulty, 1) == [(Release, "lease")]


async def test_a_read_that_fails_after_the_cancellation_is_no_unheard_error(
    faulty: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted, may_fail = threading.Event(), threading.Event()

    def fail_late(handle: XferHandle) -> str:
        posted.set()
        may_fail.wait()
        raise nixlRemoteDisconnectError("gone")

    monkeypatch.setattr(faulty.decode.agent, "transfer", fail_late)
    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(faulty.puller, "_threads", thread)
        pull = asyncio.create_task(faulty.puller.pull(make_handoff([7], 4), [5], 0))
        await asyncio.to_thread(posted.wait)
        (read,) = [task for task in asyncio.all_tasks() if "Reader._read" in repr(task)]
        pull.cancel()
        await asyncio.sleep(0)
        may_fail.set()
        await cancelled(pull)
    assert read.done()
    assert not read._log_traceback, "asyncio would log it when it is collected"


async def test_a_cancelled_late_read_is_cut_off_in_the_end(faulty: Pods) -> None:
    faulty.faults.plan[0] = Fault.LATE
    pull = asyncio.create_task(faulty.puller.pull(make_handoff([7], 4), [5], 0))
    await soon(lambda: faulty.faults.stalled)
    await cancelled(pull)
    assert faulty.faults.stalled == {}
    assert faulty.contents(5) == [None]
