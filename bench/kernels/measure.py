"""Times implementations of the same work in turn, so that noise meets all alike. What measures is an argument."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Timer = Callable[[Callable[[], object]], float]  # seconds that one call takes on the device

FLUSH_BYTES = 1 << 30  # 0.25 ms of an H200's memory: longer than a launch, far more than its 50 MB of cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds: the median and the 10th and 90th percentile."""

    median: float
    low: float
    high: float


def spread(times: list[float]) -> Spread:
    """Raises ValueError for no times."""
    if not times:
        raise ValueError("no times: at least one round is needed")
    if len(times) == 1:
        return Spread(median=times[0], low=times[0], high=times[0])
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Spread(median=statistics.median(times), low=tenths[0], high=tenths[-1])


def measure(implementations: Mapping[str, Callable[[], object]], timer: Timer, rounds: int) -> dict[str, Spread]:
    """Each implementation once untimed (it compiles), then `rounds` times in turn."""
    for run in implementations.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in implementations}
    for _ in range(rounds):
        for name, run in implementations.items():
            times[name].append(timer(run))
    return {name: spread(each) for name, each in times.items()}


def cuda_timer() -> Timer:
    """Events around one call, behind a write that empties the cache and outlasts the launch."""
    flushed = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    event: Callable[..., Any] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)

    def timed(run: Callable[[], object]) -> float:
        flushed.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return timed
