"""Sampled answers with drafts follow the model's distribution: chi-square over thousands of seeds.

Answers have three tokens out of four, so there are 64 of them, and the model's own probability of each is known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import engine.runner
from engine.sequence import SampledToken, SamplingParams, SequenceSpec
from engine.speculation.draft_model import DraftModel
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from tests.engine.speculation.test_draft_model import NUM_BLOCKS, engine_with
from tests.engine.tiny_llama import BLOCK_SIZE, OurModel, make_checkpoint, scheduled

IDS = (10, 20, 30, 40)
PROMPT = (*IDS, 10, 10, 20, 40, 10, 20)
NUM_SEEDS = 1500
TEMPERATURE = 0.7
CRITICAL = 130.0  # of chi-square with 63 degrees of freedom: exceeded once in two million runs by chance


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distribution") / "target"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distribution") / "draft"
    make_checkpoint(folder, num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[tuple[int, ...], float]:
    """The probability of each answer."""
    model = OurModel(target)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(3):
        for answer in itertools.product(IDS, repeat=length):
            logits = model.logits(scheduled((*PROMPT, *answer), 0, range(8)))[-1, list(IDS)]
            for token_id, p in zip(IDS, torch.softmax(logits.double() / TEMPERATURE, 0).tolist(), strict=True):
                probabilities[*answer, token_id] = probabilities[answer] * p
    return {answer: p for answer, p in probabilities.items() if len(answer) == 3}


def chi_square(
    target: Path, proposer: Proposer, generations: np.ndarray, expected: dict[tuple[int, ...], float]
) -> float:
    core = engine_with(target, proposer, generations)
    for seed in range(NUM_SEEDS):
        params = SamplingParams(
            temperature=TEMPERATURE, seed=seed, max_tokens=3, ignore_eos=True, logit_bias=dict.fromkeys(IDS, 100.0)
        )
        core.add(SequenceSpec(sequence_id=str(seed), prompt_ids=PROMPT, params=params))
    answers: dict[str, tuple[int, ...]] = {}
    while core.has_work:
        for event in core.step():
            answers[event.sequence_id] = (*answers.get(event.sequence_id, ()), event.token.token_id)
    assert core.load().num_accepted > NUM_SEEDS / 20
    counts = Counter(answers.values())
    assert sum(counts.values()) == NUM_SEEDS
    return sum((counts[answer] - NUM_SEEDS * p) ** 2 / (NUM_SEEDS * p) for answer, p in expected.items())


def proposers(draft: Path, generations: np.ndarray) -> dict[str, Proposer]:
    model = DraftModel(
        draft,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        generations=generations,
        dtype="float32",
        num_threads=1,
        clock=lambda: 0.0,
    )
    return {"ngram": NgramProposer(1, 2), "draft": model}


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_answers_follow_the_models_distribution(
    target: Path, draft: Path, expected: dict[tuple[int, ...], float], kind: str
) -> None:
    generations = np.zeros(NUM_BLOCKS, np.uint64)
    assert chi_square(target, proposers(draft, generations)[kind], generations, expected) < CRITICAL


def accept_every_draft(draft_ids: tuple[int, ...], drawn: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    return (*map(SampledToken, draft_ids), drawn[-1])


def test_a_rule_that_accepts_too_much_would_be_seen(
    target: Path, expected: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner, "verified", accept_every_draft)
    generations = np.zeros(NUM_BLOCKS, np.uint64)
    assert chi_square(target, NgramProposer(1, 2), generations, expected) > CRITICAL
