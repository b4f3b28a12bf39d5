"""Measures the GPU kernels and whole steps against their floor and against others, in one run of a few minutes.

    python -m bench.kernels.bench_gpu [--rounds 20] [--budget-s 200] [--json FILE]

Llama-3-8B's sizes, bfloat16, one GPU. Each implementation runs once to compile, then all of a case in turn, timed by
events behind a write that empties the cache; values are medians with the 10th and 90th percentile. The share of the
roofline is the floor of bench/kernels/roofline.py (for an H200: read it so on another GPU) by the median. Others:
torch, and FlashAttention and FlashInfer where they are installed. Bars, one a line:
`BAR name value op threshold PASS|FAIL|NOT-RUN (why)`. Without a CUDA device nothing runs and every bar says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.arguments import new_file, positive
from bench.bars import Bar, report
from bench.kernels.gpu_cases import FULL, OURS, Case, cases
from bench.kernels.gpu_step import EAGER, step_cases
from bench.kernels.measure import Spread, Timer, cuda_timer, measure
from bench.kernels.model_shapes import LLAMA_3_8B
from bench.kernels.roofline import H200, Step, bound, expected_s, floor_s
from engine.device import device_capture

STEPS = (
    *(Step(sequences=b, new=1, context=1024) for b in (1, 16, 64)),
    *(Step(sequences=1, new=n, context=n) for n in (1024, 8192)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one case. share: of the roofline that ours reaches."""

    name: str
    floor_s: float
    expected_s: float
    bound: str
    spreads: dict[str, Spread]

    @property
    def share(self) -> float:
        return self.floor_s / self.spreads[OURS].median

    @property
    def to_best_other(self) -> float | None:
        """How many times as fast as the fastest other; None without one."""
        others = [each.median for name, each in self.spreads.items() if name != OURS]
        return min(others) / self.spreads[OURS].median if others else None


@dataclass(frozen=True, slots=True)
class Goal:
    """What becomes a bar: `value` of the result of case `case`, None where it cannot be told."""

    name: str
    case: str
    value: Callable[[Result], float | None]
    threshold: float

    def bar(self, results: Mapping[str, Result], not_run: str | None) -> Bar:
        result = results.get(self.case)
        value = self.value(result) if result else None
        if value is None:
            return Bar(self.name, (), ">=", self.threshold, not_run or "not measured")
        return Bar(self.name, (value,), ">=", self.threshold)


def share(result: Result) -> float:
    return result.share


def to_best_other(result: Result) -> float | None:
    return result.to_best_other


def graph_gain(result: Result) -> float:
    """How many times as fast as the same step without graphs."""
    return result.spreads[EAGER].median / result.spreads[OURS].median


DECODE, ONE_DECODE = "paged_decode decode 64 x 8192", "paged_decode decode 1 x 8192"
PREFILL = "paged_prefill prefill 8192 x 1"
STEP, ONE_STEP = "step of llama-3-8b decode 64 x 1024", "step of llama-3-8b decode 1 x 1024"
GOALS = (
    Goal("gpu_decode_64x8192_share_of_roofline", DECODE, share, 0.70),
    Goal("gpu_decode_64x8192_to_best_other", DECODE, to_best_other, 0.90),
    Goal("gpu_decode_1x8192_to_best_other", ONE_DECODE, to_best_other, 0.80),
    Goal("gpu_prefill_8192_share_of_roofline", PREFILL, share, 0.45),
    Goal("gpu_prefill_8192_to_best_other", PREFILL, to_best_other, 0.70),
    Goal("gpu_norm_8192_share_of_roofline", "fused_add_rms_norm 8192 rows", share, 0.75),
    Goal("gpu_silu_8192_share_of_roofline", "silu_mul 8192 rows", share, 0.75),
    Goal("gpu_step_1x1024_share_of_roofline", ONE_STEP, share, 0.65),
    Goal("gpu_step_64x1024_share_of_roofline", STEP, share, 0.60),
    Goal("gpu_step_1x1024_gain_of_graphs", ONE_STEP, graph_gain, 1.5),
)


def run(made: Iterable[Case], timer: Timer, rounds: int, in_time: Callable[[], bool]) -> Iterator[Result]:
    """Measures one case after the other while `in_time`."""
    for case in itertools.takewhile(lambda _: in_time(), made):
        yield Result(
            name=case.name,
            floor_s=floor_s(H200, case.works),
            expected_s=expected_s(H200, case.works),
            bound=bound(H200, case.works),
            spreads=measure(case.implementations, timer, rounds),
        )


def line(result: Result) -> str:
    ours = result.spreads[OURS]
    others = "".join(f", {name} {each.median * 1e6:.1f}" for name, each in result.spreads.items() if name != OURS)
    return (
        f"{result.name}: {ours.median * 1e6:.1f} us ({ours.low * 1e6:.1f} to {ours.high * 1e6:.1f}), "
        f"{result.share:.0%} of the {result.bound} roofline{others}"
    )


def row(result: Result) -> dict[str, Any]:
    """Of the result file. Times in seconds."""
    return asdict(result) | {"share": result.share, "to_best_other": result.to_best_other}


def machine() -> dict[str, object]:
    """The device and every version that may matter."""
    versions = {name: _version(name) for name in ("torch", "triton", "flash-attn", "flashinfer-python")}
    if not torch.cuda.is_available():
        return {"device": None, **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        **versions,
    }


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.is_file() else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def measured(rounds: int, budget_s: float) -> Iterator[Result]:
    """All results that fit into the budget, on the current CUDA device."""
    device = torch.device("cuda")
    capture = device_capture(device)
    if capture is None:
        raise RuntimeError("steps cannot be captured on this device")
    deadline = time.monotonic() + budget_s
    made = itertools.chain(
        cases(LLAMA_3_8B, FULL, device),
        step_cases(LLAMA_3_8B, STEPS, device, capture),
    )
    return run(made, cuda_timer(), rounds, lambda: time.monotonic() < deadline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--budget-s", type=float, default=200.0, help="cases that would start later are left out")
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    not_run = None if torch.cuda.is_available() else "no CUDA device"
    results = []
    with torch.inference_mode():
        for result in () if not_run else measured(arguments.rounds, arguments.budget_s):
            print(line(result), flush=True)
            results.append(result)
    bars = [goal.bar({each.name: each for each in results}, not_run) for goal in GOALS]
    rows = [row(each) for each in results]
    report(bars, arguments.json, machine=machine(), roofline_of=H200.name, results=rows)


if __name__ == "__main__":
    main()
