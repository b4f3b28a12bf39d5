"""Speculation in a disaggregated stack: clients see the answers that they would see without, whatever pods do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto import inference_pb2 as pb
from tests.router.support import Outcome, Stack, long_running, running_stack, tokens_request
from tests.router.test_end_to_end import assert_adds_up, assert_right

DRAFTING: dict[str, object] = {"speculation": "draft", "draft_model": "fake"}
LOOKING_UP: dict[str, object] = {"speculation": "ngram"}


def requests() -> list[pb.GenerateRequest]:
    """Greedy and sampled, of several lengths, some ended by a stop id in the middle of right drafts."""
    stopped = [tokens_request(range(3, 3 + n), max_tokens=60, stop_token_ids=list(range(0, 512, 9))) for n in (2, 30)]
    sampled = [tokens_request(range(n), max_tokens=30, temperature=0.9, seed=n) for n in (1, 16, 33)]
    return [*stopped, *sampled, *(long_running(n, 50, seed=n) for n in (5, 17, 100))]


@pytest.mark.parametrize("pod", [DRAFTING, LOOKING_UP])
async def test_answers_are_those_without(registry_url: str, tmp_path: Path, pod: dict[str, object]) -> None:
    async with running_stack(registry_url, tmp_path, pod=pod) as stack:
        for request, outcome in zip(requests(), await all_at_once(stack), strict=True):
            assert_right(outcome, request)
            assert_adds_up(outcome.ledger)
        await stack.pods.assert_idle()


async def all_at_once(stack: Stack) -> list[Outcome]:
    return await asyncio.gather(*(stack.generate(request) for request in requests()))


async def test_right_drafts_save_messages_and_are_in_the_ledger(registry_url: str, tmp_path: Path) -> None:
    async with running_stack(registry_url, tmp_path, pod=DRAFTING) as stack:
        outcome = await stack.generate(long_running(40, 60))
        ledger = outcome.ledger
        assert 0 < ledger.num_accepted < ledger.num_drafts
        assert len(outcome.responses) <= 61 - ledger.num_accepted


async def test_a_decode_pod_dies_among_drafts(registry_url: str, tmp_path: Path) -> None:
    """The pod that takes over neither repeats nor loses a token, though its drafts begin elsewhere."""
    async with running_stack(registry_url, tmp_path, decode=2, pod=DRAFTING | {"fake_step_s": 0.01}) as stack:
        request, outcome = long_running(50, 120), Outcome()
        kill: asyncio.Task[None] | None = None
        async for response in stack.client.generate(request):
            outcome.responses.append(response)
            if kill is None and len(outcome.token_ids) >= 30:
                ((served, _),) = stack.router.requests.live()
                assert served._attempt is not None
                name = served._attempt.placement.decode.pod.pod_id
                pod = next(pod for pod in stack.pods.pods if pod.plan.pod_id == name)
                kill = asyncio.create_task(stack.pods.kill(pod))
        assert kill is not None
        await kill
        assert_right(outcome, request)
        assert len(outcome.ledger.attempts) == 2
