"""Captured decode steps: buckets, padding and input memory by hand, then whole answers through the eager stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.batch import Batch
from engine.core import EngineConfig, EngineCore
from engine.decode_graphs import DecodeGraphs, DecodeInputs, EagerGraph, buckets
from engine.device import device_capture, moved, uploaded
from engine.runner import TorchRunner, flatten
from engine.sequence import SamplingParams, SequenceSpec
from kernels.flat_batch import FlatBatch
from kernels.linear import LinearWeights
from tests.engine.test_runner import block_bytes
from tests.engine.tiny_families import make_family
from tests.engine.tiny_llama import BLOCK_SIZE, make_checkpoint, random_ids, scheduled

CPU = torch.device("cpu")
NUM_BLOCKS = 40


def decodes(num: int, sample: Callable[[int], bool] = lambda i: True) -> FlatBatch:
    """Row i: token 10 + i at position i of blocks i and i + 1."""
    sequences = [scheduled([10 + i], i, (i, i + 1))._replace(sample=sample(i)) for i in range(num)]
    return flatten(sequences, BLOCK_SIZE)


class Recorder:
    """A model whose logits tell which inputs it saw: [token, position, slot, context length, first block]."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, batch: FlatBatch) -> torch.Tensor:
        self.num_rows.append(batch.num_decodes)
        columns = (batch.token_ids, batch.positions, batch.slot_mapping, batch.decode_context_lens)
        return torch.stack([*columns, batch.decode_block_tables[:, 0]], dim=1).float()


def graphs(model: Recorder, max_rows: int = 6) -> DecodeGraphs:
    made = DecodeGraphs(model, EagerGraph, max_rows=max_rows, table_width=8, device=CPU)
    model.num_rows.clear()
    return made


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(2) == [1, 2]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(64) == [1, 2, 4, 8, 16, 32, 64]
    with pytest.raises(ValueError, match="max_rows = 0: must be at least 1"):
        buckets(0)


def test_every_bucket_is_captured_at_once_the_largest_first() -> None:
    shown: list[list[int]] = []

    def progress(sizes: list[int]) -> list[int]:
        shown.append(sizes)
        return sizes

    model = Recorder()
    DecodeGraphs(model, EagerGraph, max_rows=5, table_width=8, device=CPU, progress=progress)
    assert model.num_rows == [5, 4, 2, 1]
    assert shown == [[5, 4, 2, 1]]


@pytest.mark.parametrize(("num", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_a_step_takes_the_smallest_bucket(num: int, bucket: int) -> None:
    model = Recorder()
    logits = graphs(model).forward(decodes(num))
    assert model.num_rows == [bucket]
    slots = [0, 5, 10, 15, 20, 25]  # block i, or for the last two i + 1, and position i % 4 in it
    assert logits.tolist() == [[10 + i, i, slots[i], i + 1, i] for i in range(num)]


def test_rows_to_sample_are_picked_after_the_replay() -> None:
    logits = graphs(Recorder()).forward(decodes(5, sample=lambda i: i % 2 == 1))
    assert logits[:, 0].tolist() == [11, 13]


def test_padding_rows_write_nowhere_and_see_nothing_even_after_a_fuller_step() -> None:
    inputs = DecodeInputs(max_rows=4, table_width=8, device=CPU)
    inputs.fill(decodes(4), 4)
    inputs.fill(decodes(1), 4)
    batch = inputs.batch(4)
    assert batch.slot_mapping.tolist() == [0, -1, -1, -1]
    assert batch.decode_context_lens.tolist() == [1, 0, 0, 0]
    assert batch.token_ids.tolist() == [10, 0, 0, 0]
    assert batch.positions.tolist() == [0, 0, 0, 0]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3]
    assert batch.num_prefills == 0
    assert batch.prefill_cu_seqlens.tolist() == [0]


def test_inputs_before_the_first_fill_are_padding() -> None:
    batch = DecodeInputs(max_rows=2, table_width=1, device=CPU).batch(2)
    assert batch.slot_mapping.tolist() == [-1, -1]
    assert batch.decode_context_lens.tolist() == [0, 0]


def test_what_is_not_decodes_alone_or_is_too_much_is_not_taken() -> None:
    made = graphs(Recorder())
    assert made.take(decodes(6))
    assert not made.take(decodes(7))
    assert not made.take(flatten([scheduled([1], 0, (0,)), scheduled([1, 2], 0, (1,))], BLOCK_SIZE))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    make_checkpoint(folder)
    return folder


def kv_memory(folder: Path) -> NDArray[np.uint8]:
    return np.zeros(NUM_BLOCKS * block_bytes(folder), np.uint8)


def make_runner(folder: Path, memory: NDArray[np.uint8] | None = None, **options: Any) -> TorchRunner:
    memory = kv_memory(folder) if memory is None else memory
    return TorchRunner(folder, kv_memory=memory, block_size=BLOCK_SIZE, dtype="float32", num_threads=1, **options)


def test_answers_are_those_of_the_eager_path(checkpoint: Path) -> None:
    """Greedy and random, batches that grow and shrink through the buckets, preempted and resumed."""
    answers = []
    for capture in (None, EagerGraph):
        config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=24, max_num_seqs=6, max_batched_tokens=16)
        core = EngineCore(make_runner(checkpoint, capture=capture, max_decode_rows=6), config)
        for i in range(8):
            params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=4 + 2 * i, ignore_eos=True)
            core.add(SequenceSpec(sequence_id=f"s{i}", prompt_ids=tuple(random_ids(3 + 2 * i, i)), params=params))
        tokens: dict[str, list[int]] = {}
        while core.has_work:
            for event in core.step():
                tokens.setdefault(event.sequence_id, []).append(event.token.token_id)
        answers.append(tokens)
    assert answers[0] == answers[1]


def test_logits_and_cache_are_equal_to_the_bit(checkpoint: Path) -> None:
    memories, results = [], []
    for capture in (None, EagerGraph):
        memory = kv_memory(checkpoint)
        runner = make_runner(checkpoint, memory, capture=capture, max_decode_rows=4)
        prompts = [random_ids(5, i) for i in range(3)]
        runner.execute(Batch(tuple(scheduled(p, 0, (3 * i, 3 * i + 1)) for i, p in enumerate(prompts))))
        step = tuple(scheduled([7], 5, (3 * i, 3 * i + 1)) for i in range(3))
        results.append(runner.execute(Batch(step)))
        memories.append(memory)
    assert results[0] == results[1]
    np.testing.assert_array_equal(memories[0], memories[1])


def test_a_model_whose_work_depends_on_values_is_not_captured(checkpoint: Path, tmp_path: Path) -> None:
    class Captured(Exception):
        pass

    def capture(work: Callable[[], torch.Tensor]) -> EagerGraph:
        raise Captured

    with pytest.raises(Captured):
        make_runner(checkpoint, capture=capture)
    make_family(tmp_path / "experts", "mixtral")
    runner = make_runner(tmp_path / "experts", capture=capture)
    assert runner.execute(Batch((scheduled([1], 0, (0,)),)))[0]


def test_device_helpers_leave_the_cpu_alone() -> None:
    weights = LinearWeights((torch.ones(2, 3), torch.ones(1, 3)))
    assert moved(weights, CPU) is weights
    batch = decodes(2)
    assert uploaded(batch, CPU) is batch
    assert device_capture(CPU) is None


def test_moving_keeps_what_is_shared_shared() -> None:
    """The meta device stands in for a GPU."""
    embedding = torch.ones(4, 3)
    tied = (embedding, LinearWeights((embedding,)), None, 0.5)
    there, head, nothing, number = moved(tied, torch.device("meta"))
    assert there.device.type == "meta"
    assert head.parts[0] is there
    assert nothing is None
    assert number == 0.5
