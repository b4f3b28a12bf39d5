"""The real model through the whole engine, in float32: token for token what transformers generates, on every path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_model
from engine.core import EngineConfig, EngineCore
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.runner import TorchRunner, flatten
from engine.sequence import SampledToken, SamplingParams, SequenceSpec
from engine.speculation.ngram import NgramProposer
from tests.engine.tiny_llama import scheduled
from tests.reference_outputs import CASE_NAMES, ReferenceCase, reference_case, reference_cases

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
NUM_BLOCKS = 400  # all cases at once
NUM_THREADS = 1  # threads that wait for one another crawl when other processes want the cores
SHORT = 100  # tokens


@cache
def model_dir() -> Path:
    return resolve_model(DEFAULT_MODEL)


def kv_memory(dtype: str, num_blocks: int, kv_dtype: str = "auto") -> np.ndarray:
    info = model_info(model_dir(), dtype, kv_dtype=kv_dtype)
    return np.zeros(num_blocks * kv_block_bytes(info, BLOCK_SIZE), np.uint8)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    memory = kv_memory("float32", NUM_BLOCKS)
    return TorchRunner(model_dir(), kv_memory=memory, block_size=BLOCK_SIZE, dtype="float32", num_threads=NUM_THREADS)


@dataclass(slots=True)
class Answers:
    """What an engine gave for each sequence."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0


def run(core: EngineCore, cases: Iterable[ReferenceCase], suffix: str = "") -> Answers:
    """Adds all cases at once and steps until they are answered."""
    for case in cases:
        params = SamplingParams(temperature=0.0, max_tokens=len(case.output_ids), ignore_eos=True)
        core.add(SequenceSpec(sequence_id=case.name + suffix, prompt_ids=case.prompt_ids, params=params))
    answers = Answers()
    while core.has_work:
        for event in core.step():
            answers.tokens.setdefault(event.sequence_id, []).append(event.token.token_id)
            answers.num_cached[event.sequence_id] = event.num_cached
            answers.num_preemptions = max(answers.num_preemptions, event.num_preemptions)
        core.check_invariants()
    return answers


def expected(cases: Sequence[ReferenceCase], suffix: str = "") -> dict[str, list[int]]:
    return {case.name + suffix: list(case.output_ids) for case in cases}


def test_the_spread_of_prompts() -> None:
    lengths = {len(case.prompt_ids) for case in reference_cases()}
    assert len(reference_cases()) == len(CASE_NAMES) >= 20
    assert {1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 2000} <= lengths


@pytest.mark.parametrize("name", CASE_NAMES)
def test_alone_and_again_from_the_prefix_cache(runner: TorchRunner, name: str) -> None:
    case = reference_case(name)
    core = EngineCore(runner, EngineConfig(num_blocks=NUM_BLOCKS))
    assert run(core, [case]).tokens == expected([case])
    case = replace(case, output_ids=case.output_ids[:8])
    again = run(core, [case], " again")
    assert again.tokens == expected([case], " again")
    num_prompt = len(case.prompt_ids)
    assert again.num_cached[name + " again"] == min(num_prompt // BLOCK_SIZE * BLOCK_SIZE, num_prompt - 1)


def test_all_in_one_batch(runner: TorchRunner) -> None:
    core = EngineCore(runner, EngineConfig(num_blocks=NUM_BLOCKS, max_batched_tokens=8192, prefix_cache=False))
    answers = run(core, reference_cases())
    assert answers.tokens == expected(reference_cases())
    assert answers.num_preemptions == 0


def test_prefills_in_chunks_beside_decodes(runner: TorchRunner) -> None:
    core = EngineCore(runner, EngineConfig(num_blocks=NUM_BLOCKS, max_batched_tokens=64))
    cases = [case for case in reference_cases() if len(case.prompt_ids) < 1000]
    assert run(core, cases).tokens == expected(cases)


def test_preempted_and_recomputed(runner: TorchRunner) -> None:
    cases = [case for case in reference_cases() if len(case.prompt_ids) < SHORT]
    core = EngineCore(runner, EngineConfig(num_blocks=24, max_batched_tokens=128))
    answers = run(core, cases)
    assert answers.num_preemptions > 0
    assert answers.tokens == expected(cases)


def test_drafts_change_neither_tokens_nor_logprobs(runner: TorchRunner) -> None:
    """Greedy and sampled, to the last bit of each log-probability, however prompts are cut into chunks."""
    answers = []
    for proposer in (None, NgramProposer(1, 3)):
        core = EngineCore(
            runner,
            EngineConfig(num_blocks=NUM_BLOCKS, max_batched_tokens=65),
            proposer=proposer,
            clock=lambda: 0.0,  # how many drafts a step gets depends on what steps seem to take
        )
        for case in reference_cases()[::2]:
            if len(case.prompt_ids) < SHORT:
                for temperature in (0.0, 0.8):
                    params = SamplingParams(
                        temperature=temperature, seed=7, max_tokens=24, ignore_eos=True, num_logprobs=0
                    )
                    core.add(
                        SequenceSpec(
                            sequence_id=f"{case.name} {temperature}", prompt_ids=case.prompt_ids, params=params
                        )
                    )
        tokens: dict[str, list[SampledToken]] = {}
        while core.has_work:
            for event in core.step():
                tokens.setdefault(event.sequence_id, []).append(event.token)
        answers.append(tokens)
    assert answers[1] == answers[0]
    assert core.load().num_accepted > 10


def test_bfloat16_logits_stay_near_float32() -> None:
    """Teacher-forced along the reference answers.

    Stated tolerance: logits, of deviation 8, differ by less than 0.25 on average (measured: 0.15, as transformers' own
    bfloat16 does), and where float32 prefers its first token to the second by more than 0.5, bfloat16 prefers it too.
    """
    cases = [reference_case(name) for name in ("english question", "chinese list", "code")]
    exact, rounded = teacher_forced("float32", cases), teacher_forced("bfloat16", cases)
    first_two = exact.topk(2).values
    sure = first_two[:, 0] - first_two[:, 1] > 0.5
    assert (exact - rounded).abs().mean() < 0.25
    assert torch.equal(exact.argmax(-1)[sure], rounded.argmax(-1)[sure])


def teacher_forced(dtype: str, cases: Sequence[ReferenceCase]) -> torch.Tensor:
    """float32 [T, V] after every token of the cases' prompts and answers."""
    torch.set_num_threads(NUM_THREADS)
    num_blocks = 32
    kv = kv_cache(kv_memory(dtype, num_blocks), model_info(model_dir(), dtype), BLOCK_SIZE)
    model = Model.load(model_dir(), dtype)
    per_case = num_blocks // len(cases)
    sequences = [
        scheduled(case.prompt_ids + case.output_ids, 0, range(i * per_case, (i + 1) * per_case))
        for i, case in enumerate(cases)
    ]
    flat = flatten(sequences, BLOCK_SIZE)
    return model.forward(replace(flat, sample_rows=torch.arange(len(flat.token_ids))), kv.layers)
