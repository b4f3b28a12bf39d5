"""What is asked of a server, and what is counted. Each case returns metric -> value for one arm in one round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from bench.engine.client import Endpoint, RequestFailed
from bench.engine.metrics import Timeline, median_gap, median_tpot, percentile, summary
from bench.engine.workload import Request, requests

Measured = dict[str, float]
Case = Callable[[Endpoint, int], Awaitable[Measured]]

PREFILL_LENGTHS = (1024, 4096)
NUM_STREAMS = 16
NUM_STEADY = 8
LONG_PROMPT, LONG_EVERY_S = 4096, 5.0
STEADY_S, STEADY_LEAD_S = 40.0, 2.0


async def together(endpoint: Endpoint, many: Sequence[Request]) -> list[Timeline]:
    """Sends all at once and waits for all."""
    return list(await asyncio.gather(*map(endpoint.run, many)))


async def single(endpoint: Endpoint, number: int) -> Measured:
    """One stream, 128 in, 128 out: decode tokens/s from the first token on."""
    (timeline,) = await together(endpoint, requests("single", number, 1, 128, 128))
    return {"single.tok_s": 1 / median_tpot([timeline]), "single.ttft_ms": timeline.ttft * 1e3}


async def eight(endpoint: Endpoint, number: int) -> Measured:
    """The median gap between tokens of 8 streams by that of one, both 128 in and 128 out: a decode step each.

    TPOT is the mean of a stream's gaps, so it has the steps in it that compute the prompts of the other streams.
    """
    alone = await together(endpoint, requests("alone", number, 1, 128, 128))
    eight_ = await together(endpoint, requests("eight", number, 8, 128, 128))
    return {"eight.growth": median_gap(eight_) / median_gap(alone)}


async def streams(endpoint: Endpoint, number: int) -> Measured:
    """16 streams at once, 256 in, 128 out."""
    timelines = await together(endpoint, requests("streams", number, NUM_STREAMS, 256, 128))
    return {f"streams.{name}": value for name, value in summary(timelines).items()}


async def prefill(endpoint: Endpoint, number: int) -> Measured:
    """A prompt alone, one token out: prompt tokens by the time to it."""
    found = {}
    for length in PREFILL_LENGTHS:
        (timeline,) = await together(endpoint, requests(f"prefill{length}", number, 1, length, 1))
        found[f"prefill{length}.tok_s"] = timeline.num_prompt_tokens / timeline.ttft
    return found


async def steady(endpoint: Endpoint, number: int) -> Measured:
    """8 streams that never end while a prompt of 4,096 tokens arrives every 5 s: the gaps that the 8 see meanwhile."""
    length = 4096  # more than a window holds: they are cut off
    timelines = [Timeline(0.0) for _ in range(NUM_STEADY)]
    steady_ = [
        asyncio.create_task(endpoint.run(request, timeline))
        for request, timeline in zip(requests("steady", number, NUM_STEADY, 128, length), timelines, strict=True)
    ]
    long: list[asyncio.Task[Timeline]] = []
    try:
        await _all_began(timelines, steady_)
        await asyncio.sleep(STEADY_LEAD_S)
        begin = time.perf_counter()
        await _send_long_prompts(endpoint, number, long)
        gaps = [gap for t in timelines for gap in t.gaps(begin, begin + STEADY_S)]
        _check_steady(steady_)
        prompts = outcomes(long)
    finally:
        await _cancel([*steady_, *long])
    itl = {f"steady.itl_p{share}_ms": percentile(gaps, share / 100) * 1e3 for share in (50, 99)}
    return {**itl, "steady.itl_max_ms": max(gaps) * 1e3, "steady.tok_s": len(gaps) / STEADY_S, **prompts}


async def _send_long_prompts(endpoint: Endpoint, number: int, tasks: list[asyncio.Task[Timeline]]) -> None:
    """One every LONG_EVERY_S for STEADY_S, however long those before take; appended to `tasks`."""
    begin = time.perf_counter()
    for i, request in enumerate(requests("long", number, int(STEADY_S / LONG_EVERY_S), LONG_PROMPT, 2)):
        await asyncio.sleep(max(0.0, begin + i * LONG_EVERY_S - time.perf_counter()))
        tasks.append(asyncio.create_task(endpoint.run(request)))
    await asyncio.sleep(max(0.0, begin + STEADY_S - time.perf_counter()))


def _check_steady(tasks: Sequence[asyncio.Task[Timeline]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise RequestFailed("a steady stream ended before the window did")


def outcomes(tasks: Sequence[asyncio.Task[Timeline]]) -> Measured:
    """How many of the long prompts were answered, and refused (by an overloaded server), within the window."""
    ended = [task for task in tasks if task.done()]
    refused = sum(1 for task in ended if task.exception())
    return {"steady.long_finished": float(len(ended) - refused), "steady.long_refused": float(refused)}


async def _all_began(timelines: list[Timeline], tasks: list[asyncio.Task[Timeline]]) -> None:
    while not all(timeline.token_times for timeline in timelines):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.05)


async def _cancel(tasks: list[asyncio.Task[Timeline]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def warm_up(endpoint: Endpoint) -> None:
    """Once a server, uncounted: every shape that the cases use, briefly."""
    for length in PREFILL_LENGTHS:
        await together(endpoint, requests(f"warm{length}", 0, 1, length, 2))
    await together(endpoint, requests("warm", 0, NUM_STREAMS, 64, 8))


CASES: dict[str, Case] = {
    "single": single,
    "eight": eight,
    "streams": streams,
    "prefill": prefill,
    "pd": streams,
    "steady": steady,
    "chunks": steady,
}
