"""One round of chaos with a fixed seed, a judge that can say no, and a stack that takes no more after many requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis.asyncio

from proto import inference_pb2 as pb
from proto.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from proto.errors import Cancelled, DeadlineExceeded, InternalError, Overloaded, PodUnavailable
from router.client import RouterClient
from tests.system.chaos import run_round
from tests.system.chaos_requests import Case, Leave, Outcome, draw_case, judge, right_answer, run_case
from tests.system.chaos_stack import ChaosStack, Footprint, running

CHAOS_SEED, CHAOS_REQUESTS = 1, 60
FAST_POD = {"num_blocks": 256, "max_num_seqs": 16, "max_batched_tokens": 128}
SOAK_REQUESTS = 200
SOAK_BYTES = 8 << 20  # allocators keep some; a leak of one KV block table or message a request would be more
SOAK_FDS = 8  # connections come and go


async def test_a_round_of_chaos() -> None:
    report = await run_round(CHAOS_SEED, CHAOS_REQUESTS)
    assert not report.problems, "\n".join((*report.story, *report.problems))
    assert report.ends["answered"] > CHAOS_REQUESTS / 3, "too few requests ended normally to show anything"
    assert report.faults.total() > 5, "too few faults to show anything"


async def test_hundreds_of_requests_later_the_stack_takes_no_more_than_before() -> None:
    """Failure class 27. Clients leave early, too; the first batch warms up caches and thread pools."""
    async with running(num_prefill=1, num_decode=2, pod=FAST_POD) as stack:
        await soak(stack, "warm-up")
        before, keys_before = footprints(stack), await num_keys(stack)
        await soak(stack, "soak")
        assert await num_keys(stack) == keys_before == len(stack.pods)
        for name, after in footprints(stack).items():
            assert after.num_fds <= before[name].num_fds + SOAK_FDS, f"{name}: {before[name]} -> {after}"
            assert after.num_threads <= before[name].num_threads + 4, f"{name}: {before[name]} -> {after}"
            assert after.rss_bytes <= before[name].rss_bytes + SOAK_BYTES, f"{name}: {before[name]} -> {after}"
        assert await stack.stop() == []


async def soak(stack: ChaosStack, seed: str) -> None:
    problems: list[str] = []
    cases = (draw_case(seed, number, 1024) for number in range(SOAK_REQUESTS))
    async with RouterClient(stack.routers[0].ready["address"]) as client:

        async def ask() -> None:
            for case in cases:
                problems.extend(judge(case, await run_case(client, case, lambda: None), router_died=False))

        await asyncio.gather(*(ask() for _ in range(10)))
    assert problems + await stack.idle_problems() == []


def footprints(stack: ChaosStack) -> dict[str, Footprint]:
    return {member.name: member.footprint() for member in stack.members}


async def num_keys(stack: ChaosStack) -> int:
    async with redis.asyncio.from_url(stack.registry.url) as registry:
        keys: int = await registry.dbsize()
        return keys


# --- The judge ------------------------------------------------------------------------------------------------------


def a_case(leave: Leave = Leave.NEVER) -> Case:
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[65, 66]))
    request.sampling.temperature = 0
    request.sampling.max_tokens = 3
    return Case("by hand", request, right_answer(request), leave, 1)


def a_right_outcome() -> Outcome:
    """197, 276, 356: see engine/fake.py."""
    first = pb.GenerateResponse(request_id="r")
    first.tokens.add(token_id=197)
    last = pb.GenerateResponse(request_id="r", text="\ufffd<276><356>", finish_reason=FINISH_REASON_LENGTH)
    last.tokens.add(token_id=276)
    last.tokens.add(token_id=356)
    last.usage.prompt_tokens, last.usage.completion_tokens = 2, 3
    last.ledger.wall_s = 1.0
    last.ledger.entries.add(stage="decode", seconds=1.0)
    last.ledger.attempts.add(decode_pod="d")
    return Outcome([first, last])


def test_a_right_outcome_is_right() -> None:
    assert judge(a_case(), a_right_outcome(), router_died=False) == []


def lose_a_token(outcome: Outcome) -> None:
    del outcome.responses[-1].tokens[0]


def change_a_token(outcome: Outcome) -> None:
    outcome.responses[0].tokens[0].token_id = 198


def change_the_text(outcome: Outcome) -> None:
    outcome.responses[-1].text = "<276><356>"


def lose_the_end(outcome: Outcome) -> None:
    outcome.responses.pop()


def repeat_the_end(outcome: Outcome) -> None:
    outcome.responses.append(outcome.responses[-1])


def finish_and_fail(outcome: Outcome) -> None:
    outcome.error = PodUnavailable("too late")


def stop_instead(outcome: Outcome) -> None:
    outcome.responses[-1].finish_reason = FINISH_REASON_STOP


def count_wrong(outcome: Outcome) -> None:
    outcome.responses[-1].usage.completion_tokens = 2


def cache_too_much(outcome: Outcome) -> None:
    outcome.responses[-1].usage.cached_tokens = 3


def lose_time(outcome: Outcome) -> None:
    outcome.responses[-1].ledger.entries[0].seconds = 0.9


@pytest.mark.parametrize(
    "spoil",
    [
        lose_a_token,
        change_a_token,
        change_the_text,
        lose_the_end,
        repeat_the_end,
        finish_and_fail,
        stop_instead,
        count_wrong,
        cache_too_much,
        lose_time,
    ],
)
def test_a_wrong_outcome_is_found(spoil: Callable[[Outcome], None]) -> None:
    outcome = a_right_outcome()
    spoil(outcome)
    assert judge(a_case(), outcome, router_died=True)


def test_errors_must_have_a_reason() -> None:
    def verdict(error: Exception, leave: Leave, *, router_died: bool = False) -> list[str]:
        assert isinstance(error, (PodUnavailable, Cancelled, DeadlineExceeded, Overloaded, InternalError))
        return judge(a_case(leave), Outcome(error=error), router_died=router_died)

    assert verdict(PodUnavailable("x"), Leave.NEVER)
    assert not verdict(PodUnavailable("x"), Leave.NEVER, router_died=True)
    assert verdict(Overloaded("x"), Leave.NEVER, router_died=True)
    assert not verdict(Cancelled("x"), Leave.ABORT)
    assert verdict(DeadlineExceeded("x"), Leave.ABORT)
    assert not verdict(DeadlineExceeded("x"), Leave.DEADLINE)
    assert verdict(InternalError("x"), Leave.DEADLINE, router_died=True)
