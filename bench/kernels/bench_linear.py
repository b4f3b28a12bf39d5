"""How fast linear layers run: against reading the same bytes, and against torch, in the same run.

    python -m bench.kernels.bench_linear [--threads 2] [--rounds 15] [--json FILE]

All linears of SmolLM2-135M with its head, 269 MB of bfloat16, in the order of a decode step, so that no cache holds
them; activations, and torch's weights, have the dtype that `auto` is on this machine. Each round times everything once,
one after the other so that noise meets all alike: a sum over the bytes (the read), our linears and torch's at several
batch sizes, then one layer at 1,024 rows. Ratios are taken within a round; values are medians over rounds. Bars:
`BAR name value op threshold PASS|FAIL|NOT-RUN (why)`, one a line.

- decode_1_row_share_of_read: time of the read by time of all linears at one row.
- decode_8_rows_growth: time at 8 rows by time at 1.
- decode_16_rows_to_roofline: time at 16 rows by the longer of the read and the arithmetic at torch's prefill rate.
- prefill_1024_rows_to_torch: GFLOP/s by torch's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.arguments import new_file, positive
from bench.bars import Bar, report
from engine.checkpoint import resolve_dtype
from engine.weights import TORCH_DTYPES
from kernels.linear import LinearWeights, linear
from kernels.panels import pack

DTYPE = TORCH_DTYPES[resolve_dtype("auto")]
NUM_LAYERS, HIDDEN, INNER, KV, VOCAB = 30, 576, 1536, 192, 49152
LAYER = (((HIDDEN, KV, KV), HIDDEN), ((HIDDEN,), HIDDEN), ((INNER, INNER), HIDDEN), ((HIDDEN,), INNER))
DECODE_ROWS = (1, 4, 8, 16)
PREFILL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Model:
    """The same weights in bfloat16 panels for us and in DTYPE for torch. A read is a sum over `memory`, which holds as
    many bytes as the panels.
    """

    memory: torch.Tensor
    ours: list[LinearWeights]
    torchs: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()


def make_model() -> Model:
    shapes = [*LAYER * NUM_LAYERS, ((VOCAB,), HIDDEN)]
    memory = torch.empty(sum(sum(rows) * columns for rows, columns in shapes), dtype=torch.bfloat16)
    memory.normal_(std=0.05)
    ours, torchs, begin = [], [], 0
    for part_rows, columns in shapes:
        parts = []
        for rows in part_rows:
            parts.append(memory[begin : begin + rows * columns].view(rows, columns))
            begin += rows * columns
        ours.append(LinearWeights(tuple(map(pack, parts))))
        torchs.append(torch.cat(parts).to(DTYPE))
    return Model(memory, ours, torchs)


def inputs(rows: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    return {columns: torch.randn(rows, columns).to(dtype) for columns in (HIDDEN, INNER)}


def run_ours(weights: list[LinearWeights], x: dict[int, torch.Tensor]) -> None:
    for each in weights:
        linear(x[each.columns], each)


def run_torch(weights: list[torch.Tensor], x: dict[int, torch.Tensor]) -> None:
    for each in weights:
        F.linear(x[each.shape[1]], each)


def timed(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds; the dicts are by rows."""

    read: float
    ours: dict[int, float] = field(default_factory=dict)
    torchs: dict[int, float] = field(default_factory=dict)


@torch.inference_mode()
def run_round(model: Model, x: dict[int, dict[int, torch.Tensor]]) -> Round:
    words = model.memory.view(torch.float32)
    result = Round(read=timed(words.sum))
    for rows in (*DECODE_ROWS, PREFILL_ROWS):
        layers = slice(len(LAYER)) if rows == PREFILL_ROWS else slice(None)
        result.ours[rows] = timed(partial(run_ours, model.ours[layers], x[rows]))
        result.torchs[rows] = timed(partial(run_torch, model.torchs[layers], x[rows]))
    return result


def flops(model: Model, rows: int) -> float:
    layers = slice(len(LAYER)) if rows == PREFILL_ROWS else slice(None)
    return 2.0 * rows * sum(each.numel() for each in model.torchs[layers])


def bars(model: Model, rounds: list[Round]) -> list[Bar]:
    def roofline(r: Round, rows: int) -> float:
        return max(r.read, flops(model, rows) / flops(model, PREFILL_ROWS) * r.torchs[PREFILL_ROWS])

    def each(of: Callable[[Round], float]) -> tuple[float, ...]:
        return tuple(map(of, rounds))

    return [
        Bar("linear_decode_1_row_share_of_read", each(lambda r: r.read / r.ours[1]), ">=", 0.75),
        Bar("linear_decode_8_rows_growth", each(lambda r: r.ours[8] / r.ours[1]), "<=", 1.25),
        Bar("linear_decode_16_rows_to_roofline", each(lambda r: r.ours[16] / roofline(r, 16)), "<=", 1.25),
        Bar(
            "linear_prefill_1024_rows_to_torch",
            each(lambda r: r.torchs[PREFILL_ROWS] / r.ours[PREFILL_ROWS]),
            ">=",
            0.90,
        ),
    ]


def table(model: Model, rounds: list[Round]) -> list[str]:
    read = statistics.median(r.read for r in rounds)
    lines = [
        f"activations: {DTYPE}",
        f"read: {model.num_bytes / 1e6:.0f} MB in {read * 1e3:.1f} ms, {model.num_bytes / read / 1e9:.1f} GB/s",
    ]
    for rows in (*DECODE_ROWS, PREFILL_ROWS):
        ours, torchs = (
            statistics.median(times) for times in zip(*((r.ours[rows], r.torchs[rows]) for r in rounds), strict=True)
        )
        what = "one layer" if rows == PREFILL_ROWS else "all linears"
        lines.append(
            f"{rows} rows, {what}: {ours * 1e3:.1f} ms, {flops(model, rows) / ours / 1e9:.0f} GFLOP/s; "
            f"torch {torchs * 1e3:.1f} ms, {flops(model, rows) / torchs / 1e9:.0f} GFLOP/s"
        )
    return lines


def report_linears(
    arguments: argparse.Namespace, lines: list[str], results: list[Bar], rounds: list[dict[str, Any]]
) -> None:
    """Prints `lines` and bars; writes bars and rounds where --json says. With too few cores no bar has a value."""
    print("\n".join(lines))
    cores = len(os.sched_getaffinity(0))
    if arguments.threads > cores:
        why_not = f"{arguments.threads} threads on {cores} cores"
        results = [replace(bar, values=(), why_not=why_not) for bar in results]
    report(results, arguments.json, threads=arguments.threads, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = make_model()
    x = {rows: inputs(rows, DTYPE) for rows in (*DECODE_ROWS, PREFILL_ROWS)}
    run_round(model, x)
    rounds = [run_round(model, x) for _ in range(arguments.rounds)]
    report_linears(arguments, table(model, rounds), bars(model, rounds), [asdict(r) for r in rounds])


if __name__ == "__main__":
    main()
