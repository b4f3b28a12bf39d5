"""Decode attention on a CPU over narrower KV caches: bfloat16, int8 and fp8 against float32, in the same run.

    python -m bench.kernels.bench_kv_dtypes [--context 4096] [--rounds 15] [--json FILE]

Decode attention of one sequence through the 30 layers of SmolLM2-135M, over block-major caches whose blocks lie in
shuffled order, on one thread. A round takes the formats one after the other, so that noise meets all alike, and counts
processor time of the thread, which other programs do not add to. Ratios are taken within a round; values are medians
over rounds. Bars: `BAR name value op threshold PASS|FAIL|NOT-RUN (why)`, one a line.

- int8_bytes_to_float32: bytes that a context takes, scales included.
- bfloat16_decode_to_float32, int8_decode_to_float32, fp8_decode_to_float32: processor time of all layers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace

import torch

from bench.arguments import new_file, positive
from bench.bars import Bar, report
from engine.batch import ModelInfo
from engine.kv_cache import KVCache, kv_cache
from engine.kv_format import kv_block_bytes
from kernels.kv_write import kv_write
from kernels.paged_decode import paged_decode
from kvtransfer.memory import allocate

SMOLLM2 = ModelInfo(
    model_id="bench",
    weights_revision="0",
    vocab_size=49152,
    max_model_len=8192,
    eos_token_ids=frozenset(),
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    dtype="float32",
    kv_dtype="float32",
)
NUM_HEADS, BLOCK_SIZE = 9, 16
FORMATS = ("float32", "bfloat16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence of `context` tokens."""

    kv_dtype: str
    context: int
    cache: KVCache
    block_table: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return len(self.block_table[0]) * self.cache.blocks.shape[1]


def make_case(kv_dtype: str, context: int) -> Case:
    model = replace(SMOLLM2, kv_dtype=kv_dtype)
    num_blocks = -(-context // BLOCK_SIZE)
    cache = kv_cache(allocate("inproc", num_blocks * kv_block_bytes(model, BLOCK_SIZE)), model, BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:context]
    for layer in cache.layers:
        k, v = torch.randn(2, context, model.num_kv_heads, model.head_dim)
        kv_write(k, v, layer, slots)
    return Case(kv_dtype, context, cache, order.int()[None])


def decode_s(case: Case, q: torch.Tensor) -> float:
    """Processor seconds of this thread for all layers."""
    lengths = torch.tensor([case.context], dtype=torch.int32)
    started = time.thread_time()
    for layer in case.cache.layers:
        paged_decode(q, layer, case.block_table, lengths, 0.125)
    return time.thread_time() - started


def measure(context: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by format."""
    cases = [make_case(kv_dtype, context) for kv_dtype in FORMATS]
    q = torch.randn(1, NUM_HEADS, SMOLLM2.head_dim)
    times: dict[str, list[float]] = {case.kv_dtype: [] for case in cases}
    for round_number in range(rounds + 1):
        for case in cases:
            seconds = decode_s(case, q)
            if round_number:  # the first one warms up
                times[case.kv_dtype].append(seconds)
    return times


def bars(times: dict[str, list[float]]) -> tuple[Bar, ...]:
    def ratios(kv_dtype: str) -> tuple[float, ...]:
        return tuple(ours / plain for ours, plain in zip(times[kv_dtype], times["float32"], strict=True))

    sizes = {kv_dtype: kv_block_bytes(replace(SMOLLM2, kv_dtype=kv_dtype), BLOCK_SIZE) for kv_dtype in FORMATS}
    return (
        Bar("int8_bytes_to_float32", (sizes["int8"] / sizes["float32"],), "<=", 0.27),
        Bar("bfloat16_decode_to_float32", ratios("bfloat16"), "<=", 0.75),
        Bar("int8_decode_to_float32", ratios("int8"), "<=", 0.75),
        Bar("fp8_decode_to_float32", ratios("fp8"), "<=", 1.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="decode attention over narrower KV caches on a CPU")
    parser.add_argument("--context", type=positive, default=4096, help="tokens that are attended to")
    parser.add_argument("--rounds", type=positive, default=15, help="rounds to take medians of")
    parser.add_argument("--json", type=new_file, help="file to write all rounds to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(arguments.context, arguments.rounds)
    for kv_dtype, seconds in times.items():
        print(
            f"{kv_dtype:8} {statistics.median(seconds) * 1e3:6.2f} ms of processor time for {SMOLLM2.num_layers} layers"
        )
    report(bars(times), arguments.json, context=arguments.context, load=os.getloadavg()[0], seconds=times)


if __name__ == "__main__":
    main()
