"""What quantised weights cost in quality: perplexity of the default model, against its weights in bfloat16.

    python -m bench.engine.perplexity [--model NAME] [--quantizations int8 int4 gguf] [--windows 16] [--json FILE]

The text is the prose of Python's language reference that ships inside Python itself (`pydoc_data.topics`). It is cut
into windows of 512 tokens, of which some evenly spaced ones are read, each on its own; the second half of a window is
scored, so that every scored token has at least 256 before it. Activations are float32. Bars, as ratios to bfloat16:
`BAR name value op threshold PASS|FAIL`, one a line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.batch import ScheduledSequence
from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_model
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.runner import flatten
from engine.sequence import SamplingParams

DTYPE, BLOCK_SIZE, WINDOW = "float32", 16, 512
THRESHOLDS = {"int8": 1.01, "int4": 1.10, "gguf": 1.01}


@dataclass(frozen=True, slots=True)
class Measured:
    quantization: str
    perplexity: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    threshold: float

    def line(self) -> str:
        verdict = "PASS" if self.value <= self.threshold else "FAIL"
        return f"BAR {self.name} {self.value:.4f} <= {self.threshold:.2f} {verdict}"


def text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(model_dir: Path, count: int) -> list[list[int]]:
    """Token ids of `count` evenly spaced windows of the text."""
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text(), add_special_tokens=False).ids
    last = len(ids) // WINDOW - 1
    starts = [WINDOW * (last * i // max(1, count - 1)) for i in range(count)]
    return [ids[start : start + WINDOW] for start in starts]


class Scorer:
    """The model with one quantisation, and KV memory for one window."""

    def __init__(self, model_dir: Path, quantization: str) -> None:
        num_blocks = WINDOW // BLOCK_SIZE
        info = model_info(model_dir, DTYPE)
        memory = np.zeros(num_blocks * kv_block_bytes(info, BLOCK_SIZE), np.uint8)
        self._model = Model.load(model_dir, DTYPE, quantization=quantization)
        self._kv = kv_cache(memory, info, BLOCK_SIZE).layers
        self._table = tuple(range(num_blocks))

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """float64 [WINDOW / 2], of the tokens in the window's second half."""
        sequence = ScheduledSequence("s", tuple(ids), 0, self._table, True, SamplingParams(temperature=0.0), (), ())
        first = WINDOW // 2
        rows = torch.arange(first - 1, WINDOW - 1)
        logits = self._model.forward(replace(flatten([sequence], BLOCK_SIZE), sample_rows=rows), self._kv)
        return logits.double().log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None])[:, 0]


def measure(model_name: str, quantization: str, count: int) -> Measured:
    model_dir = resolve_model(model_name, quantization=quantization)
    scorer = Scorer(model_dir, quantization)
    started_at = time.perf_counter()
    logprobs = torch.cat([scorer.logprobs(ids) for ids in windows(model_dir, count)])
    seconds = time.perf_counter() - started_at
    return Measured(quantization, math.exp(-float(logprobs.mean())), logprobs.numel(), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantizations", nargs="*", choices=THRESHOLDS, default=list(THRESHOLDS))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    digest = hashlib.sha256(text().encode()).hexdigest()[:16]
    print(f"text: pydoc_data.topics, {len(text()):,} characters, sha256 {digest}")
    results = []
    for quantization in ("none", *arguments.quantizations):
        results.append(measure(arguments.model, quantization, arguments.windows))
        r = results[-1]
        print(
            f"{r.quantization}: perplexity {r.perplexity:.4f} over {r.num_tokens} tokens, {r.seconds:.1f} s", flush=True
        )
    base = results[0].perplexity
    bars = [Bar(f"perplexity_{r.quantization}", r.perplexity / base, THRESHOLDS[r.quantization]) for r in results[1:]]
    print("\n".join(bar.line() for bar in bars))
    if arguments.json:
        values = {"text_sha256": digest, "results": [asdict(r) for r in results], "bars": [asdict(b) for b in bars]}
        arguments.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
