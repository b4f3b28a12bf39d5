"""What the failure of a call to a pod is taken for, and how long calls may take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest
from grpc.aio import Metadata

from proto.errors import TRAILER, Overloaded, PdserveError, PodUnavailable
from router import pod_client
from router.failures import CutOff, PodLost
from router.pod_client import PrefillClient
from tests.router.support import long_running, running_stack
from tests.router.test_end_to_end import assert_right
from tests.router.test_policy import prefill


def broken(details: str, *trailer: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(*trailer), details)


FULL = Overloaded("full", pod_id="p").to_info().SerializeToString()


@pytest.mark.parametrize(
    ("error", "kind", "after_a_standstill"),
    [
        (broken("ping timeout"), PodLost, CutOff),
        (broken("failed to connect to all addresses; x"), PodUnavailable, PodUnavailable),
        (broken("full", (TRAILER, FULL)), Overloaded, Overloaded),
    ],
)
async def test_whose_fault_it_is(
    error: grpc.aio.AioRpcError, kind: type[PdserveError], after_a_standstill: type[PdserveError]
) -> None:
    for stood_still, expected in ((False, kind), (True, after_a_standstill)):
        client = PrefillClient(prefill("p"), lambda: 0.0, lambda stood_still=stood_still: stood_still)  # type: ignore[misc]
        raised = client.error_of(error)
        assert (type(raised), raised.pod_id) == (expected, "p")
        assert client.reachable == (expected in {CutOff, Overloaded})
        await client.close()


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_long_engine_step_is_no_sign_of_a_lost_pod(
    registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_prefill: int
) -> None:
    """A call that begins or reserves a sequence waits for the step under way; the token stream says who lives."""
    monkeypatch.setattr(pod_client, "CALL_S", 0.05)
    slow: dict[str, object] = {"fake_step_s": 0.3}
    async with running_stack(registry_url, tmp_path, prefill=num_prefill, pod=slow) as stack:
        requests = [long_running(20, 4, seed) for seed in range(3)]
        outcomes = await asyncio.gather(*(stack.generate(request) for request in requests))
    for request, outcome in zip(requests, outcomes, strict=True):
        assert_right(outcome, request)
        assert not any("pod_unavailable" in attempt.failure for attempt in outcome.ledger.attempts)
