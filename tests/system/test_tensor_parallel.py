"""A stack whose pods are two processes each, on the real model: transformers' answer, though a rank dies."""

from __future__ import annotations

import signal

import psutil
import pytest

from proto import inference_pb2 as pb
from router.client import RouterClient
from tests.reference_outputs import ReferenceCase, reference_case
from tests.support.stack import LaunchedStack, launched_stack

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


FLAGS = ("--dtype", "float32", "--kv-memory", "64MiB", "--num-threads", "1", "--tensor-parallel", "2")


async def generate(router: RouterClient, case: ReferenceCase, stack: LaunchedStack) -> tuple[int, ...]:
    """The answer's tokens; after the third one a rank of the pod that computes them is killed."""
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=case.prompt_ids))
    request.sampling.temperature = 0
    request.sampling.ignore_eos = True
    request.sampling.max_tokens = len(case.output_ids)
    tokens: list[int] = []
    killed = False
    async for response in router.generate(request):
        tokens += [token.token_id for token in response.tokens]
        if len(tokens) >= 3 and not killed:
            killed = True
            await kill_a_rank_of_the_busy_pod(stack)
    return tuple(tokens)


async def kill_a_rank_of_the_busy_pod(stack: LaunchedStack) -> None:
    for pod in stack.pods:
        if await stack.gauge(pod, "sequences_running"):
            (rank,) = psutil.Process(stack.pod_process(pod).pid).children()
            rank.send_signal(signal.SIGKILL)
            return
    raise AssertionError("no pod runs the request")


async def test_a_rank_killed_in_mid_answer_does_not_change_it() -> None:
    """Its pod ends, and the other one goes on."""
    with launched_stack(*FLAGS, "--colocated", "--decode", "2", "--start-timeout-s", "400") as stack:
        async with RouterClient(stack.router_address) as router:
            case = reference_case("code")
            assert await generate(router, case, stack) == case.output_ids
            ledger = await router.timeline()
    assert [bool(attempt.failure) for attempt in ledger.attempts] == [True, False]
