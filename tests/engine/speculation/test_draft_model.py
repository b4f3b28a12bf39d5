"""Drafts by tiny checkpoints: the target itself, and one that knows nothing of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.batch import ScheduledSequence
from engine.checkpoint import CheckpointError, model_info
from engine.core import EngineConfig, EngineCore
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner, flatten
from engine.sequence import SampledToken, SamplingParams, SequenceSpec
from engine.speculation import draft_model
from engine.speculation.draft_model import DraftModel
from engine.speculation.proposer import DraftRequest, Proposer
from engine.speculation.vocabulary import check_same_vocabulary
from kernels.flat_batch import FlatBatch
from tests.engine.tiny_llama import BLOCK_SIZE, make_checkpoint, random_ids

NUM_BLOCKS = 48


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller, and with a shorter context."""
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    make_checkpoint(folder, num_hidden_layers=1, hidden_size=32, max_position_embeddings=40)
    return folder


def engine(target: Path, draft: Path | None, num_blocks: int = NUM_BLOCKS) -> EngineCore:
    generations = np.zeros(num_blocks, np.uint64)
    proposer = None if draft is None else drafting(draft, generations, num_blocks)
    return engine_with(target, proposer, generations)


def engine_with(target: Path, proposer: Proposer | None, generations: np.ndarray) -> EngineCore:
    """As many blocks as there are generations."""
    num_blocks = len(generations)
    memory = np.zeros(num_blocks * kv_block_bytes(model_info(target, "float32"), BLOCK_SIZE), np.uint8)
    runner = TorchRunner(target, kv_memory=memory, block_size=BLOCK_SIZE, dtype="float32", num_threads=1)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_batched_tokens=32,
        num_draft_tokens=3,
    )
    return EngineCore(runner, config, generations=generations, proposer=proposer)


def drafting(folder: Path, generations: np.ndarray, num_blocks: int = NUM_BLOCKS) -> DraftModel:
    return DraftModel(
        folder,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        generations=generations,
        dtype="float32",
        num_threads=1,
        clock=lambda: 0.0,  # so that no depth is given up for the time it takes on this machine
    )


def answers(core: EngineCore, specs: Iterable[SequenceSpec]) -> dict[str, list[SampledToken]]:
    for spec in specs:
        core.add(spec)
    tokens: dict[str, list[SampledToken]] = {}
    while core.has_work:
        for event in core.step():
            tokens.setdefault(event.sequence_id, []).append(event.token)
        core.check_invariants()
    return tokens


def specs(num_sequences: int, temperature: float, **params: object) -> list[SequenceSpec]:
    return [
        SequenceSpec(
            sequence_id=f"s{i}",
            prompt_ids=tuple(random_ids(3 + 4 * i, i)),
            params=SamplingParams(temperature=temperature, seed=i, max_tokens=14, ignore_eos=True, **params),  # type: ignore[arg-type]  # any field
        )
        for i in range(num_sequences)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_target_as_its_own_draft_is_always_right(target: Path, temperature: float) -> None:
    core = engine(target, target)
    each = specs(1, temperature, num_logprobs=2, repetition_penalty=1.2)
    assert answers(core, each) == answers(engine(target, None), each)
    load = core.load()
    assert load.num_accepted == load.num_drafts > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_with_another_draft_are_the_same(target: Path, other: Path, temperature: float) -> None:
    """Beside one another, preempted and recomputed, past the draft's own context."""
    core, plain = engine(target, other, num_blocks=22), engine(target, None, num_blocks=22)
    each = specs(7, temperature)
    assert answers(core, each) == answers(plain, each)
    assert 0 <= core.load().num_accepted < core.load().num_drafts


def test_what_lies_in_the_prefix_cache_is_not_computed_again(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(target, target)
    [first] = specs(1, 0.0)
    prompt = tuple(random_ids(21, 7))
    long = SequenceSpec(sequence_id="long", prompt_ids=prompt, params=first.params)
    answer = [token.token_id for token in answers(core, [long])["long"]]
    computed: list[int] = []

    def watched(sequences: Sequence[ScheduledSequence], block_size: int) -> FlatBatch:
        computed.append(sum(len(scheduled.token_ids) for scheduled in sequences))
        return flatten(sequences, block_size)

    monkeypatch.setattr(draft_model, "flatten", watched)
    again = SequenceSpec(sequence_id="again", prompt_ids=(*prompt, *answer[:8]), params=first.params)
    answers(core, [again])
    assert computed[0] < 10  # of 30 tokens: those behind the last full block that the first answer had drafted for


def test_a_long_prompt_is_caught_up_with_over_several_steps(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 8)
    model = drafting(target, np.zeros(NUM_BLOCKS, np.uint64))
    params = SamplingParams(temperature=0.0)
    requests = [
        DraftRequest(f"s{i}", random_ids(length, i), length, params, tuple(range(8 * i, 8 * i + 8)), 2)
        for i, length in enumerate((13, 2))
    ]
    lengths = [[len(draft) for draft in model.propose(requests)] for _ in range(3)]
    assert lengths == [[0, 0], [2, 2], [2, 2]]
    whole = drafting(target, np.zeros(NUM_BLOCKS, np.uint64))
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 64)
    assert model.propose(requests) == whole.propose(requests)


def test_no_drafts_past_the_drafts_own_context_nor_where_none_are_wanted(other: Path) -> None:
    model = drafting(other, np.zeros(NUM_BLOCKS, np.uint64))
    params = SamplingParams(temperature=0.0)
    table = tuple(range(12))
    lengths = []
    for num_tokens, num_drafts in ((36, 3), (37, 3), (38, 3), (5, 0)):
        request = DraftRequest("a", random_ids(num_tokens), num_tokens, params, table, num_drafts)
        lengths.append(len(model.propose([request])[0]))
    assert lengths == [3, 0, 0, 0]


def test_a_draft_model_must_have_the_same_vocabulary(target: Path, other: Path, tmp_path: Path) -> None:
    check_same_vocabulary(target, other)
    make_checkpoint(tmp_path / "large", vocab_size=97)
    with pytest.raises(CheckpointError, match="has a vocabulary of 97 tokens, must have the 96 of"):
        check_same_vocabulary(target, tmp_path / "large")


@pytest.mark.parametrize("as_list", [False, True])
def test_ids_must_mean_the_same(target: Path, tmp_path: Path, as_list: bool) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, words in zip(folders, (["x", "y", "z"], ["x", "z", "y"]), strict=True):
        shutil.copytree(target, folder)
        vocab: object = [[word, -1.0] for word in words] if as_list else {word: i for i, word in enumerate(words)}
        tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"content": "<end>", "id": 95}]}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_same_vocabulary(folders[0], folders[0])
    check_same_vocabulary(folders[0], target)
    with pytest.raises(CheckpointError, match=r"2 tokens have other ids than in .*, such as 'y': 2, must be 1"):
        check_same_vocabulary(*folders)


@pytest.mark.parametrize(
    ("words", "draft_words", "complaint"),
    [
        (["x"], ["x", "y"], "'y': 1, is not in the model's vocabulary"),
        (["x", "y"], ["x"], "'y': missing, must be 1"),
    ],
)
def test_a_token_that_one_side_lacks_is_said_so(
    target: Path, tmp_path: Path, words: list[str], draft_words: list[str], complaint: str
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, each in zip(folders, (words, draft_words), strict=True):
        shutil.copytree(target, folder)
        vocab = {word: i for i, word in enumerate(each)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    with pytest.raises(CheckpointError, match=f"such as {complaint}$"):
        check_same_vocabulary(*folders)
