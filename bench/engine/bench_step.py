"""What a decode step costs beside the C++ of its layers, head and sampling, and how a step grows with the batch.

    python -m bench.engine.bench_step [--threads 2] [--context 128] [--rounds 5] [--json FILE]

The real engine and the default model, greedy. Each round times some steps at every batch size, one after the other.
Medians of a round's steps, then over rounds. Bars: `BAR name value op threshold PASS|FAIL|NOT-RUN (why)`, one a line.

- step_python_ms_batch_16: the engine thread's processor time of a step outside the C++, in milliseconds. It runs alone
  then, so that this is also the time that the step waits for it, without that of other programs.
- step_growth_1_to_8: a whole step at batch 8 by one at batch 1.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from bench.arguments import exit_code, new_file, positive
from bench.bars import report
from bench.engine.goals import Goal, Round, evaluate, ratio
from engine.checkpoint import model_info, resolve_dtype, resolve_model
from engine.core import EngineConfig, EngineCore
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner
from engine.sequence import SamplingParams, SequenceSpec
from kernels.cpu import decoder, sampling
from kernels.cpu.library import Library, library
from kvtransfer.memory import allocate

MODEL, DTYPE, BLOCK_SIZE = "smollm2-135m-instruct", resolve_dtype("auto"), 16
BATCHES = (1, 8, 16)
STEPS = 20
_CALLERS = (decoder, sampling)  # of what a step calls
_OPS = ("forward", "sample")
_GOALS = (
    Goal(
        name="step_python_ms_batch_16",
        needs=(("batch 16", "Python ms"),),
        value=float,
        op="<=",
        threshold=0.5,
    ),
    Goal(
        name="step_growth_1_to_8",
        needs=(("batch 8", "step ms"), ("batch 1", "step ms")),
        value=ratio,
        op="<=",
        threshold=1.25,
    ),
)


@dataclass(slots=True)
class Stopwatch:
    """The thread's seconds of processor time inside the library since it was last read."""

    elapsed_s: float = 0.0

    def read(self) -> float:
        elapsed_s, self.elapsed_s = self.elapsed_s, 0.0
        return elapsed_s

    def timed(self, op: Callable[..., int], *arguments: object) -> int:
        started_at = time.thread_time()
        result = op(*arguments)
        self.elapsed_s += time.thread_time() - started_at
        return result


@contextlib.contextmanager
def watched_library(watch: Stopwatch) -> Iterator[None]:
    real = library()
    ops: dict[str, Any] = {name: partial(watch.timed, getattr(real, name)) for name in _OPS}
    watched = replace(real, **ops)

    def get_watched() -> Library:  # a mock would count its calls, which costs more than what is measured
        return watched

    with contextlib.ExitStack() as stack:
        for module in _CALLERS:
            stack.enter_context(mock.patch.object(module, "library", get_watched))
        yield


def make_core(threads: int, context: int) -> EngineCore:
    folder = resolve_model(MODEL)
    num_blocks = max(BATCHES) * ((context + 2 * STEPS) // BLOCK_SIZE + 2)
    memory = allocate("shm", num_blocks * kv_block_bytes(model_info(folder, DTYPE), BLOCK_SIZE))
    runner = TorchRunner(folder, kv_memory=memory, block_size=BLOCK_SIZE, dtype=DTYPE, num_threads=threads)
    return EngineCore(runner, EngineConfig(num_blocks=num_blocks, max_batched_tokens=1024, prefix_cache=False))


def start(core: EngineCore, batch: int, context: int) -> None:
    """Runs `batch` sequences up to their first step of decodes alone."""
    vocab_size = model_info(resolve_model(MODEL), DTYPE).vocab_size
    prompts = np.random.default_rng(batch).integers(10, vocab_size, (batch, context)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=2 * STEPS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(SequenceSpec(sequence_id=str(i), prompt_ids=tuple(prompt), params=params))
    while core.load().num_waiting_tokens > 0:
        core.step()


def run_round(core: EngineCore, context: int, watch: Stopwatch) -> Round:
    measured: dict[tuple[str, str], float] = {}
    for batch in BATCHES:
        start(core, batch, context)
        steps, outside = [], []
        for _ in range(STEPS):
            watch.read()
            started_at, busy_at = time.perf_counter(), time.thread_time()
            core.step()
            steps.append(time.perf_counter() - started_at)
            outside.append(time.thread_time() - busy_at - watch.read())
        measured[f"batch {batch}", "step ms"] = statistics.median(steps) * 1e3
        measured[f"batch {batch}", "Python ms"] = statistics.median(outside) * 1e3
        for i in range(batch):
            core.abort(str(i))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--context", type=positive, default=128, help="tokens of each prompt")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    longest = model_info(resolve_model(MODEL), DTYPE).max_model_len - 2 * STEPS
    if arguments.context > longest:
        parser.error(f"argument --context: {arguments.context}: must be at most {longest} with this model")
    core, watch = make_core(arguments.threads, arguments.context), Stopwatch()
    with watched_library(watch):
        rounds = [run_round(core, arguments.context, watch) for _ in range(arguments.rounds + 1)][1:]
    for key in rounds[0]:
        print(f"{' '.join(key)}: {statistics.median(each[key] for each in rounds):.2f}")
    table = [{" ".join(key): value for key, value in each.items()} for each in rounds]
    report(evaluate(_GOALS, rounds, {}), arguments.json, rounds=table)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
