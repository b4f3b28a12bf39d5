"""What quantised weights and KV cost in quality: perplexity of the default model, against bfloat16 weights, float32 KV.

    python -m bench.engine.perplexity [--model NAME] [--quantizations int8 int4 gguf] [--kv-dtypes bf16 int8 fp8]
                                      [--windows 16] [--json FILE]

The text is the prose of Python's language reference that ships inside Python itself (`pydoc_data.topics`). It is cut
into windows of 512 tokens, of which some evenly spaced ones are read, each on its own; the second half of a window is
scored, so that every scored token has at least 256 before it. Activations are float32. One thing is quantised at a
time: KV goes with bfloat16 weights. Bars, as ratios to nothing quantised:
`BAR name value op threshold PASS|FAIL|NOT-RUN (why)`, one a line.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.arguments import exit_code, new_file, positive
from bench.bars import Bar, report
from engine.batch import ScheduledSequence
from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_model
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.runner import flatten
from engine.sequence import SamplingParams

DTYPE, BLOCK_SIZE, WINDOW = "float32", 16, 512
THRESHOLDS = {"int8": 1.01, "int4": 1.10, "gguf": 1.01}  # quantization -> most that perplexity may be, as a ratio
KV_THRESHOLDS = {"bf16": 1.01, "int8": 1.01, "fp8": 1.03}  # kv_dtype -> the same


@dataclass(frozen=True, slots=True)
class Measured:
    quantization: str
    kv_dtype: str
    perplexity: float
    num_tokens: int
    seconds: float

    @property
    def name(self) -> str:
        return self.quantization if self.kv_dtype == "auto" else f"kv_{self.kv_dtype}"

    @property
    def threshold(self) -> float:
        return THRESHOLDS[self.quantization] if self.kv_dtype == "auto" else KV_THRESHOLDS[self.kv_dtype]


def text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(model_dir: Path, count: int) -> list[list[int]]:
    """Token ids of `count` evenly spaced windows of the text."""
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text(), add_special_tokens=False).ids
    last = len(ids) // WINDOW - 1
    starts = [WINDOW * (last * i // max(1, count - 1)) for i in range(count)]
    return [ids[start : start + WINDOW] for start in starts]


class Scorer:
    """The model with one quantisation of its weights and one of KV, and memory for one window."""

    def __init__(self, model_dir: Path, quantization: str, kv_dtype: str) -> None:
        num_blocks = WINDOW // BLOCK_SIZE
        info = model_info(model_dir, DTYPE, kv_dtype=kv_dtype)
        memory = np.zeros(num_blocks * kv_block_bytes(info, BLOCK_SIZE), np.uint8)
        self._model = Model.load(model_dir, DTYPE, quantization=quantization)
        self._kv = kv_cache(memory, info, BLOCK_SIZE).layers
        self._table = tuple(range(num_blocks))

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """float64 [WINDOW / 2], of the tokens in the window's second half."""
        params, prompt_ids = SamplingParams(temperature=0.0), tuple(ids)
        sequence = ScheduledSequence("s", prompt_ids, 0, self._table, True, params, prompt_ids, ())
        first = WINDOW // 2
        rows = torch.arange(first - 1, WINDOW - 1)
        logits = self._model.forward(replace(flatten([sequence], BLOCK_SIZE), sample_rows=rows), self._kv)
        return logits.double().log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0]


def measure(model_name: str, quantization: str, kv_dtype: str, count: int) -> Measured:
    model_dir = resolve_model(model_name, quantization=quantization)
    scorer = Scorer(model_dir, quantization, kv_dtype)
    started_at = time.perf_counter()
    logprobs = torch.cat([scorer.logprobs(ids) for ids in windows(model_dir, count)])
    seconds = time.perf_counter() - started_at
    return Measured(quantization, kv_dtype, math.exp(-float(logprobs.mean())), logprobs.numel(), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantizations", nargs="*", choices=THRESHOLDS, default=list(THRESHOLDS))
    parser.add_argument("--kv-dtypes", nargs="*", choices=KV_THRESHOLDS, default=list(KV_THRESHOLDS))
    parser.add_argument("--windows", type=positive, default=16)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    digest = hashlib.sha256(text().encode()).hexdigest()[:16]
    print(f"text: pydoc_data.topics, {len(text()):,} characters, sha256 {digest}")
    results = []
    kinds = [(each, "auto") for each in ("none", *arguments.quantizations)]
    for quantization, kv_dtype in [*kinds, *(("none", each) for each in arguments.kv_dtypes)]:
        r = measure(arguments.model, quantization, kv_dtype, arguments.windows)
        results.append(r)
        print(f"{r.name}: perplexity {r.perplexity:.4f} over {r.num_tokens} tokens, {r.seconds:.1f} s", flush=True)
    base = results[0].perplexity
    bars = [Bar(f"perplexity_{r.name}", (r.perplexity / base,), "<=", r.threshold) for r in results[1:]]
    report(bars, arguments.json, text_sha256=digest, results=[asdict(r) for r in results])


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
