"""KV caches of other dtypes than the model's: the same bits on every path, and how far from float32 the answers are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_model
from engine.core import EngineConfig, EngineCore
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.runner import TorchRunner, flatten
from engine.sequence import SamplingParams, SequenceSpec
from tests.engine.tiny_llama import BLOCK_SIZE, OurModel, make_checkpoint, random_ids, scheduled
from tests.reference_outputs import reference_case

every_narrow = pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
every_kv_dtype = pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "int8", "fp8"])

PROMPT = random_ids(30, 1)
TABLE = (5, 9, 2, 30, 17, 8, 21, 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv") / "tiny"
    make_checkpoint(folder)
    return folder


def test_bf16_has_two_spellings(tiny: Path) -> None:
    short, long = (model_info(tiny, "float32", kv_dtype=name) for name in ("bf16", "bfloat16"))
    assert short == long
    assert short.kv_dtype == "bfloat16"


@every_kv_dtype
def test_neither_chunks_nor_neighbours_nor_places_change_a_bit(tiny: Path, kv_dtype: str) -> None:
    whole, parts = (OurModel(tiny, kv_dtype=kv_dtype) for _ in range(2))
    expected = whole.logits(scheduled(PROMPT, 0, TABLE))
    other_table = TABLE[::-1]
    logits = []
    for start, end in ((0, 7), (7, 9), (9, 30)):
        neighbours = scheduled(random_ids(5, start), 0, (40, 41)), scheduled(random_ids(11, end), 0, (50, 51, 52))
        chunk = scheduled(PROMPT[start:end], start, other_table)
        logits.append(parts.logits(neighbours[0], chunk, neighbours[1])[5 : 5 + end - start])
    assert torch.equal(torch.cat(logits), expected)
    assert torch.equal(parts.blocks[list(other_table)], whole.blocks[list(TABLE)])


@every_kv_dtype
def test_a_block_handed_over_as_bytes_continues_to_the_bit(tiny: Path, kv_dtype: str) -> None:
    ours, theirs = (OurModel(tiny, kv_dtype=kv_dtype) for _ in range(2))
    ours.logits(scheduled(PROMPT, 0, TABLE))
    theirs.blocks[list(TABLE[::-1])] = ours.blocks[list(TABLE)]
    token = scheduled((7,), len(PROMPT), TABLE), scheduled((7,), len(PROMPT), TABLE[::-1])
    assert torch.equal(ours.logits(token[0]), theirs.logits(token[1]))


@every_narrow
def test_of_a_block_written_token_by_token_the_first_bytes_stay(tiny: Path, kv_dtype: str) -> None:
    """A scale for a whole block would have to change them when a larger token comes."""
    ours = OurModel(tiny, kv_dtype=kv_dtype)
    ours.logits(scheduled(PROMPT[:1], 0, (4,)))
    first = [
        part[4, :, 0].clone() for layer in ours.kv for part in (layer.k.view(torch.uint8), layer.v.view(torch.uint8))
    ]
    for position in range(1, BLOCK_SIZE):
        ours.logits(scheduled(PROMPT[position : position + 1], position, (4,)))
    after = [part[4, :, 0] for layer in ours.kv for part in (layer.k.view(torch.uint8), layer.v.view(torch.uint8))]
    assert all(map(torch.equal, first, after))


def answers(
    runner: TorchRunner, prompts: dict[str, Any], config: EngineConfig, count: int
) -> tuple[dict[str, Any], int]:
    """Tokens of each prompt, and the most preemptions of any."""
    core = EngineCore(runner, config)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    for name, prompt in prompts.items():
        core.add(SequenceSpec(sequence_id=name, prompt_ids=tuple(prompt), params=params))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    num_preemptions = 0
    while core.has_work:
        for event in core.step():
            tokens[event.sequence_id].append(event.token.token_id)
            num_preemptions = max(num_preemptions, event.num_preemptions)
        core.check_invariants()
    return tokens, num_preemptions


def torch_runner(folder: Path, kv_dtype: str, num_blocks: int, block_size: int) -> TorchRunner:
    info = model_info(folder, "float32", kv_dtype=kv_dtype)
    memory = np.zeros(num_blocks * kv_block_bytes(info, block_size), np.uint8)
    return TorchRunner(
        folder, kv_memory=memory, block_size=block_size, dtype="float32", kv_dtype=kv_dtype, num_threads=1
    )


@every_narrow
def test_preempted_in_small_chunks_and_few_blocks(tiny: Path, kv_dtype: str) -> None:
    runner = torch_runner(tiny, kv_dtype, 64, BLOCK_SIZE)
    prompts = {str(i): random_ids(3 + 5 * i, i) for i in range(8)}
    roomy = EngineConfig(block_size=BLOCK_SIZE, num_blocks=64, prefix_cache=False)
    expected = {name: answers(runner, {name: prompt}, roomy, 12)[0][name] for name, prompt in prompts.items()}
    tight = EngineConfig(block_size=BLOCK_SIZE, num_blocks=20, max_num_seqs=8, max_batched_tokens=16)
    given, num_preemptions = answers(runner, prompts, tight, 12)
    assert given == expected
    assert num_preemptions > 0


CASES = ("english question", "chinese list", "code")


@pytest.mark.model
@pytest.mark.timeout(900)
@every_narrow
def test_the_real_model_answers_alike_on_every_path(kv_dtype: str) -> None:
    runner = torch_runner(resolve_model(DEFAULT_MODEL), kv_dtype, 40, 16)
    prompts = {name: reference_case(name).prompt_ids for name in CASES}
    alone = {
        name: answers(runner, {name: prompt}, EngineConfig(num_blocks=40), 16)[0][name]
        for name, prompt in prompts.items()
    }
    together, _ = answers(
        runner, prompts, EngineConfig(num_blocks=40, max_num_seqs=4, max_batched_tokens=24, prefix_cache=False), 16
    )
    assert together == alone


@pytest.mark.model
@pytest.mark.timeout(900)
def test_logits_stay_near_those_of_float32_caches() -> None:
    """Teacher-forced along the reference answers.

    Stated tolerance: logits, of deviation 8, differ on average by less than 0.05 with bf16, 0.2 with int8 and 0.45 with
    fp8 (measured: 0.03, 0.12 and 0.29; bfloat16 throughout: 0.15), and where float32 prefers its first token to the
    second by more than 1, so do they.
    """
    exact = teacher_forced("auto")
    first_two = exact.topk(2).values
    sure = first_two[:, 0] - first_two[:, 1] > 1.0
    for kv_dtype, tolerance in (("bf16", 0.05), ("int8", 0.2), ("fp8", 0.45)):
        rounded = teacher_forced(kv_dtype)
        assert (exact - rounded).abs().mean() < tolerance
        assert torch.equal(exact.argmax(-1)[sure], rounded.argmax(-1)[sure])


def teacher_forced(kv_dtype: str) -> torch.Tensor:
    """float32 [T, V] after every token of the cases' prompts and answers."""
    torch.set_num_threads(1)
    folder = resolve_model(DEFAULT_MODEL)
    info = model_info(folder, "float32", kv_dtype=kv_dtype)
    cache = kv_cache(np.zeros(32 * kv_block_bytes(info, 16), np.uint8), info, 16)
    sequences = []
    for i, case in enumerate(map(reference_case, CASES)):
        sequences.append(scheduled(case.prompt_ids + case.output_ids, 0, range(i * 10, i * 10 + 10)))
    flat = flatten(sequences, 16)
    logits: torch.Tensor = Model.load(folder, "float32").forward(
        replace(flat, sample_rows=torch.arange(len(flat.token_ids))), cache.layers
    )
    return logits
