"""What speculative decoding gains on text that repeats, and costs on text that does not; by turns with none.

    python -m bench.engine.bench_speculation [--model NAME] [--draft-model NAME] [--threads 2] [--rounds 3]
                                             [--json FILE]

Each round decodes the same prompts without drafts and with prompt lookup (and a draft model, if one is named), at one
stream and at several. Only decode steps are timed; answers must be equal, token for token. Ratios are of tokens a
second, with by without, taken within a round; values are medians. Where rows are dear (many streams on few cores)
drafts cannot gain, and must not lose. Bars: `BAR name value op threshold PASS|FAIL|NOT-RUN (why)`, one a line.

- ngram_copy_N: N streams that are asked to copy a text from their prompt, greedily.
- ngram_prose_N: N streams that write a story, sampled at temperature 1, so that nothing repeats.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import exit_code, new_file, positive
from bench.bars import Bar, report
from engine.batch import EngineLoad
from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_dtype, resolve_model
from engine.core import EngineConfig, EngineCore
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner
from engine.sequence import SamplingParams, SequenceSpec
from engine.speculation.draft_model import DraftModel
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from kvtransfer.memory import allocate

BLOCK_SIZE = 16
BLOCKS_PER_STREAM = 48
NUM_STREAMS = (1, 8)
NUM_TOKENS = 128  # of each answer
COPY = "Repeat this text word for word:\n\n{text}"
PROSE = "Write an unusual story, number {number}, in which no sentence resembles another."
FACTS = (
    "The lighthouse stands {n} metres above the northern harbour and was built in 18{n}. Its keeper, Mr. Wilkins, "
    "counts {n} steps to the lamp every evening. Ships from Bergen, Hull and Ostend pass at a distance of {n} miles. "
    "In winter the fog horn sounds every {n} seconds, and the children of the village sleep through it. "
)
THRESHOLDS = {("copy", 1): 1.5, ("copy", 8): 0.95, ("prose", 1): 0.95, ("prose", 8): 0.95}


@dataclass(frozen=True, slots=True)
class Run:
    tokens: dict[str, list[int]]
    tokens_per_s: float
    load: EngineLoad


class Bench:
    """One model with its KV memory; a fresh engine over them for each run."""

    def __init__(self, model_dir: Path, draft_dir: Path | None, num_threads: int) -> None:
        dtype = resolve_dtype("auto")
        self._num_blocks = max(NUM_STREAMS) * BLOCKS_PER_STREAM
        memory = allocate("inproc", self._num_blocks * kv_block_bytes(model_info(model_dir, dtype), BLOCK_SIZE))
        self._runner = TorchRunner(
            model_dir, kv_memory=memory, block_size=BLOCK_SIZE, dtype=dtype, num_threads=num_threads
        )
        self._generations = np.zeros(self._num_blocks, np.uint64)
        self._proposers: dict[str, Callable[[], Proposer | None]] = {
            "off": lambda: None,
            "ngram": lambda: NgramProposer(2, 4),
        }
        if draft_dir is not None:
            draft = DraftModel(
                draft_dir,
                num_blocks=self._num_blocks,
                block_size=BLOCK_SIZE,
                generations=self._generations,
                dtype=dtype,
                num_threads=num_threads,
            )
            self._proposers["draft"] = lambda: draft

    @property
    def kinds(self) -> list[str]:
        return list(self._proposers)

    def run(self, kind: str, specs: list[SequenceSpec]) -> Run:
        config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=self._num_blocks, prefix_cache=False)
        core = EngineCore(self._runner, config, generations=self._generations, proposer=self._proposers[kind]())
        for spec in specs:
            core.add(spec)
        tokens: dict[str, list[int]] = {spec.sequence_id: [] for spec in specs}
        num_timed, timed_s = 0, 0.0
        while core.has_work:
            is_decode = all(tokens.values())
            started_at = time.perf_counter()
            events = core.step()
            if is_decode:
                timed_s += time.perf_counter() - started_at
                num_timed += len(events)
            for event in events:
                tokens[event.sequence_id].append(event.token.token_id)
        return Run(tokens, num_timed / timed_s, core.load())


def prompts(encode: Callable[[str], list[int]], num_streams: int) -> dict[str, list[SequenceSpec]]:
    texts = {
        "copy": [
            COPY.format(text="".join(FACTS.format(n=11 + 3 * i + j) for j in range(2))) for i in range(num_streams)
        ],
        "prose": [PROSE.format(number=i) for i in range(num_streams)],
    }
    temperatures = {"copy": 0.0, "prose": 1.0}
    return {
        work: [
            SequenceSpec(
                sequence_id=f"{work}{i}",
                prompt_ids=tuple(encode(text)),
                params=SamplingParams(temperature=temperatures[work], seed=i, max_tokens=NUM_TOKENS, ignore_eos=True),
            )
            for i, text in enumerate(each)
        ]
        for work, each in texts.items()
    }


def chat_encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """A user's message as the model's template wraps it."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import, and only here

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)

    def encode(text: str) -> list[int]:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = tokenizer.encode(chat, add_special_tokens=False)
        return ids

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft-model")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    model_dir = resolve_model(arguments.model)
    draft_dir = resolve_model(arguments.draft_model) if arguments.draft_model else None
    bench, encode = Bench(model_dir, draft_dir, arguments.threads), chat_encoder(model_dir)
    bars = []
    for num_streams in NUM_STREAMS:
        for work, specs in prompts(encode, num_streams).items():
            rounds = [{kind: bench.run(kind, specs) for kind in bench.kinds} for _ in range(arguments.rounds)]
            for kind in bench.kinds[1:]:
                name = f"{kind}_{work}_{num_streams}"
                bars.append(Bar(name, gains(name, kind, rounds), ">=", THRESHOLDS[work, num_streams]))
    report(bars, arguments.json)


def gains(name: str, kind: str, rounds: list[dict[str, Run]]) -> tuple[float, ...]:
    """Tokens a second with drafts of this kind by those without, of each round; says the last on stdout."""
    for each in rounds:
        assert each[kind].tokens == each["off"].tokens, f"{name}: drafts changed an answer"
    last = rounds[-1][kind]
    print(
        f"{name}: {rounds[-1]['off'].tokens_per_s:.1f} -> {last.tokens_per_s:.1f} tokens/s, "
        f"{last.load.num_accepted} of {last.load.num_drafts} drafts right",
        flush=True,
    )
    return tuple(each[kind].tokens_per_s / each["off"].tokens_per_s for each in rounds)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
