"""The runner: scheduled sequences to flat batches and back, block copies, and the memory it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, BlockCopy, ScheduledSequence
from engine.checkpoint import kv_bytes_per_token, model_info
from engine.core import EngineConfig, EngineCore
from engine.model_config import read_config
from engine.runner import TorchRunner, flatten
from engine.sequence import FinishReason, SamplingParams, SequenceSpec
from tests.engine.tiny_llama import BLOCK_SIZE, GREEDY, make_checkpoint, random_ids, reference_greedy, scheduled

NUM_BLOCKS = 48


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("runner") / "tiny"
    return folder, make_checkpoint(folder)


@pytest.fixture
def memory(reference: tuple[Path, Any]) -> np.ndarray:
    return np.zeros(NUM_BLOCKS * block_bytes(reference[0]), np.uint8)


@pytest.fixture
def runner(reference: tuple[Path, Any], memory: np.ndarray) -> TorchRunner:
    return TorchRunner(reference[0], kv_memory=memory, block_size=BLOCK_SIZE, dtype="float32", num_threads=1)


def block_bytes(folder: Path) -> int:
    return BLOCK_SIZE * kv_bytes_per_token(read_config(folder), "float32")


def test_flatten_by_hand() -> None:
    decode = ScheduledSequence("d", (7,), 5, (3, 9), True, GREEDY, (), ())
    chunk = ScheduledSequence("c", (1, 2, 3), 4, (8, 2), False, GREEDY, (), ())
    whole = ScheduledSequence("w", (4, 5), 0, (6,), True, GREEDY, (), ())
    flat = flatten([decode, chunk, whole], block_size=4)
    assert flat.token_ids.tolist() == [7, 1, 2, 3, 4, 5]
    assert flat.positions.tolist() == [5, 4, 5, 6, 0, 1]
    assert flat.slot_mapping.tolist() == [9 * 4 + 1, 8, 9, 10, 24, 25]
    assert flat.sample_rows.tolist() == [0, 5]
    assert flat.decode_block_tables.tolist() == [[3, 9]]
    assert flat.decode_context_lens.tolist() == [6]
    assert flat.prefill_block_tables.tolist() == [[8, 2], [6, 0]]
    assert flat.prefill_context_lens.tolist() == [7, 2]
    assert flat.prefill_cu_seqlens.tolist() == [0, 3, 5]


def test_results_come_in_the_batchs_order(runner: TorchRunner, reference: tuple[Path, Any]) -> None:
    """Sequences with one token are computed first, whatever their place."""
    prompts = [random_ids(9, 1), random_ids(1, 2), random_ids(6, 3), random_ids(1, 4)]
    batch = [replace(scheduled(p, 0, range(4 * i, 4 * i + 3)), sample=i != 2) for i, p in enumerate(prompts)]
    tokens = [token and token.token_id for token in runner.execute(Batch(tuple(batch)))]
    expected = [reference_greedy(reference[1], p, 1)[0] for p in prompts]
    assert tokens == [expected[0], expected[1], None, expected[3]]


def test_copies_happen_before_the_batch_is_computed(
    runner: TorchRunner, memory: np.ndarray, reference: tuple[Path, Any]
) -> None:
    prompt = random_ids(8, 5)
    blocks = memory.reshape(NUM_BLOCKS, -1)
    runner.execute(Batch((scheduled(prompt[:6], 0, (1, 2)),)))
    shared = blocks[2].copy()
    copied = runner.execute(Batch((scheduled(prompt[6:], 6, (1, 5)),), copies=(BlockCopy(2, 5),)))
    assert copied[0] is not None
    assert copied[0].token_id == reference_greedy(reference[1], prompt, 1)[0]
    np.testing.assert_array_equal(blocks[2], shared)
    assert (blocks[5] != shared).any()


def test_copies_alone(runner: TorchRunner, memory: np.ndarray) -> None:
    blocks = memory.reshape(NUM_BLOCKS, -1)
    blocks[3], blocks[4] = 7, 9
    assert runner.execute(Batch((), (BlockCopy(3, 30), BlockCopy(4, 31)))) == []
    assert (blocks[30] == 7).all()
    assert (blocks[31] == 9).all()


def test_kv_moved_as_bytes_continues_on_another_runner(
    runner: TorchRunner, memory: np.ndarray, reference: tuple[Path, Any]
) -> None:
    """What a hand-off does: the block's bytes alone carry the context, to other block ids."""
    folder, model = reference
    prompt = random_ids(10, 6)
    runner.execute(Batch((scheduled(prompt, 0, (4, 1, 7)),)))
    other_memory = np.zeros(NUM_BLOCKS * block_bytes(folder), np.uint8)
    other_memory.reshape(NUM_BLOCKS, -1)[[20, 11, 2]] = memory.reshape(NUM_BLOCKS, -1)[[4, 1, 7]]
    other = TorchRunner(folder, kv_memory=other_memory, block_size=BLOCK_SIZE, dtype="float32", num_threads=1)
    first, second = reference_greedy(model, prompt, 2)
    continued = other.execute(Batch((scheduled([first], 10, (20, 11, 2)),)))
    assert continued[0] is not None
    assert continued[0].token_id == second


def test_through_the_engine(runner: TorchRunner, reference: tuple[Path, Any]) -> None:
    """Many sequences, few blocks: chunked, batched, preempted, and still transformers' tokens."""
    prompts = {f"s{i}": random_ids(3 + 5 * i, i) for i in range(8)}
    core = EngineCore(runner, EngineConfig(block_size=BLOCK_SIZE, num_blocks=20, max_num_seqs=8, max_batched_tokens=16))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for name, prompt in prompts.items():
        core.add(SequenceSpec(sequence_id=name, prompt_ids=tuple(prompt), params=params))
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    finished, num_preemptions = {}, 0
    while core.has_work:
        for event in core.step():
            answers[event.sequence_id].append(event.token.token_id)
            finished[event.sequence_id] = event.finish_reason
            num_preemptions += event.num_preemptions
        core.check_invariants()
    assert answers == {name: reference_greedy(reference[1], prompt, 12) for name, prompt in prompts.items()}
    assert set(finished.values()) == {FinishReason.LENGTH}
    assert num_preemptions > 0


def test_memory_must_be_whole_blocks(reference: tuple[Path, Any]) -> None:
    folder = reference[0]
    for num_bytes in (0, 100, block_bytes(folder) + 1):
        with pytest.raises(ValueError, match=f"kv_memory has {num_bytes} bytes: must be a multiple of a block's"):
            TorchRunner(
                folder, kv_memory=np.zeros(num_bytes, np.uint8), block_size=BLOCK_SIZE, dtype="float32", num_threads=1
            )


def test_it_describes_its_model_and_keeps_its_threads(runner: TorchRunner, reference: tuple[Path, Any]) -> None:
    assert runner.model == model_info(reference[0], "float32")
    torch.set_num_threads(2)
    runner.execute(Batch((scheduled([1], 0, (0,)),)))
    assert torch.get_num_threads() == 1
