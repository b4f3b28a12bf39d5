"""How fast linear layers over int8 and int4 weights run: against reading the same bytes, and growing with the rows.

    python -m bench.kernels.bench_linear_quantized [--threads 2] [--rounds 15] [--json FILE]

All linears of SmolLM2-135M in the order of a decode step, the head in int8, int4 in groups of 32 with offsets;
activations, and torch's weights, have the dtype that `auto` is on this machine. Rounds, ratios, medians and `BAR` lines
are as in bench_linear.py. For each of int8 and int4:

- 1_row_share_of_read: time of a sum over the weights' bytes by time of all linears at one row.
- 8_rows_growth: time at 8 rows by time at 1.
- 1024_rows_to_torch: time of torch's linears of one layer at 1,024 rows by ours.

And int8_1_row_to_torch: time of one layer over torch's int8 (bfloat16 x, `_weight_int8pack_mm`) by ours at 1 row.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench.arguments import new_file, positive
from bench.bars import Bar
from bench.kernels.bench_linear import (
    DTYPE,
    HIDDEN,
    LAYER,
    NUM_LAYERS,
    VOCAB,
    inputs,
    report_linears,
    run_ours,
    run_torch,
    timed,
)
from engine.quantize import INT4_GROUP
from kernels.linear import LinearWeights
from kernels.panels import PANEL
from kernels.quantized import STEP, QuantizedMatrix

FORMATS = ("int8", "int4")
ROWS = (1, 4, 8, 16)
PREFILL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Model:
    """linears: of every layer, then the head. A read is a sum over `memory`, which holds as many bytes."""

    linears: list[LinearWeights]
    memory: torch.Tensor

    @property
    def layer(self) -> list[LinearWeights]:
        return self.linears[: len(LAYER)]


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds, by format and by rows. torchs: its layer in DTYPE at PREFILL_ROWS. int8_*: a layer at 1 row."""

    read: dict[str, float]
    ours: dict[str, dict[int, float]]
    torchs: float
    int8_torchs: float
    int8_layer: float


def make_model(kind: str) -> Model:
    shapes = [shape for _ in range(NUM_LAYERS) for shape in LAYER]
    parts = [tuple(make_matrix(kind, n, columns) for n in rows) for rows, columns in shapes]
    parts.append((make_matrix("int8", VOCAB, HIDDEN),))
    num_bytes = sum(part.num_bytes for of_one in parts for part in of_one)
    return Model([LinearWeights(of_one) for of_one in parts], torch.zeros(num_bytes // 4))


def make_matrix(kind: str, rows: int, columns: int) -> QuantizedMatrix:
    """Of random integers, in the formats that engine/quantize.py makes; rows and columns fill panels and groups."""
    panels, steps, row_scales = rows // PANEL, columns // STEP, torch.ones(rows)
    if kind == "int8":
        return QuantizedMatrix(
            rows, columns, torch.randint(-127, 128, (panels, steps, 2, PANEL, 4), dtype=torch.int8), row_scales
        )
    packed = torch.randint(0, 256, (panels, steps, PANEL, 4), dtype=torch.uint8)
    scales = torch.rand(panels, columns // INT4_GROUP, PANEL).half()
    return QuantizedMatrix(rows, columns, packed, row_scales, scales, -8 * scales)


def make_int8_of_torch() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One layer's weights and scales."""
    weights = [torch.randint(-128, 128, (sum(rows), columns), dtype=torch.int8) for rows, columns in LAYER]
    return [(weight, torch.ones(weight.shape[0], dtype=torch.bfloat16)) for weight in weights]


def run_int8_of_torch(weights: list[tuple[torch.Tensor, torch.Tensor]], x: dict[int, torch.Tensor]) -> None:
    for weight, scales in weights:
        torch._weight_int8pack_mm(x[weight.shape[1]], weight, scales)


@torch.inference_mode()
def run_rounds(num_rounds: int) -> tuple[list[Round], dict[str, Model]]:
    models = {kind: make_model(kind) for kind in FORMATS}
    plain = [torch.randn(sum(rows), columns).to(DTYPE) for rows, columns in LAYER]
    int8_of_torch = make_int8_of_torch()
    x = {rows: inputs(rows, DTYPE) for rows in (*ROWS, PREFILL_ROWS)}
    narrow = {columns: one.bfloat16() for columns, one in x[1].items()}

    def one_round() -> Round:
        ours: dict[str, dict[int, float]] = {}
        for kind, model in models.items():
            ours[kind] = {rows: timed(partial(run_ours, model.linears, x[rows])) for rows in ROWS}
            ours[kind][PREFILL_ROWS] = timed(partial(run_ours, model.layer, x[PREFILL_ROWS]))
        return Round(
            read={kind: timed(model.memory.sum) for kind, model in models.items()},
            ours=ours,
            torchs=timed(partial(run_torch, plain, x[PREFILL_ROWS])),
            int8_torchs=timed(partial(run_int8_of_torch, int8_of_torch, narrow)),
            int8_layer=timed(partial(run_ours, models["int8"].layer, x[1])),
        )

    one_round()
    return [one_round() for _ in range(num_rounds)], models


def bars(rounds: list[Round]) -> list[Bar]:
    found = []
    for kind in FORMATS:
        share = tuple(r.read[kind] / r.ours[kind][1] for r in rounds)
        growth = tuple(r.ours[kind][8] / r.ours[kind][1] for r in rounds)
        prefill = tuple(r.torchs / r.ours[kind][PREFILL_ROWS] for r in rounds)
        found += [
            Bar(f"linear_{kind}_1_row_share_of_read", share, ">=", 0.60),
            Bar(f"linear_{kind}_8_rows_growth", growth, "<=", 2.5),
            Bar(f"linear_{kind}_1024_rows_to_torch", prefill, ">=", 1.0),
        ]
    to_torch = tuple(r.int8_torchs / r.int8_layer for r in rounds)
    return [*found, Bar("linear_int8_1_row_to_torch", to_torch, ">=", 1.0)]


def table(models: dict[str, Model], rounds: list[Round]) -> list[str]:
    lines = []
    for kind, model in models.items():
        read = statistics.median(r.read[kind] for r in rounds)
        times = {rows: statistics.median(r.ours[kind][rows] for r in rounds) for rows in (*ROWS, PREFILL_ROWS)}
        shown = ", ".join(f"{rows} rows {seconds * 1e3:.1f} ms" for rows, seconds in times.items())
        lines.append(
            f"{kind}: {model.memory.nbytes / 1e6:.0f} MB, read {read * 1e3:.1f} ms; {shown} (the last: one layer)"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rounds, models = run_rounds(arguments.rounds)
    report_linears(arguments, table(models, rounds), bars(rounds), [asdict(r) for r in rounds])


if __name__ == "__main__":
    main()
