"""What this machine can do at best, measured beside the servers: `python -m bench.engine.limits --threads 2`, a Worker.

Each in the turn of the case that is compared with it, as both change with what else the machine does.
read_s, beside `single`: the time to read as many bytes as the default model's linears and head have in bfloat16 (the
fastest of some sums over them: other work may slow one). matmul_flops, beside `prefill`: of torch on a prefill's shape,
in the dtype that `auto` gives on this machine, which is what our server computes in.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.arguments import positive
from bench.engine.worker import answer_lines
from engine.checkpoint import resolve_dtype
from engine.weights import TORCH_DTYPES

READ_BYTES = 269_000_000
ROWS, COLUMNS, DEPTH = 1024, 1536, 576
REPEATS = 7


def best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    words = torch.ones(READ_BYTES // 4)
    dtype = TORCH_DTYPES[resolve_dtype("auto")]
    x, weights = torch.randn(ROWS, DEPTH, dtype=dtype), torch.randn(COLUMNS, DEPTH, dtype=dtype)
    flops = 2.0 * ROWS * COLUMNS * DEPTH

    def measure(request: dict[str, Any]) -> dict[str, float]:
        if request["case"] == "single":
            return {"limits.read_s": best_s(words.sum)}
        return {"limits.matmul_flops": flops / best_s(lambda: torch.nn.functional.linear(x, weights))}

    with torch.inference_mode():
        answer_lines(measure)


if __name__ == "__main__":
    main()
