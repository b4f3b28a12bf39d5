"""The runner: scheduled sequences to flat batches and back, block copies, and the memory it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, BlockCopy, ScheduledSequence
from engine.checkpoint import model_info
from engine.core import EngineConfig, EngineCore
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner, flatten
from engine.sequence import FinishReason, SamplingParams, SequenceSpec
from tests.engine.tiny_llama import BLOCK_SIZE, GREEDY, make_checkpoint, random_ids, reference_greedy, scheduled

NUM_BLOCKS = 48
HEAD_DIM = 16


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
    return kv_block_bytes(model_info(folder, "float32"), BLOCK_SIZE)


def test_flatten_by_hand() -> None:
    decode = ScheduledSequence("d", (7,), 5, (3, 9), True, GREEDY, (), ())
    chunk = ScheduledSequence("c", (1, 2, 3), 4, (8, 2), False, GREEDY, (0,) * 9, ())
    whole = ScheduledSequence("w", (4, 5), 0, (6,), True, GREEDY, (4, 5), ())
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


def test_flatten_makes_a_decode_row_of_each_draft() -> None:
    chunk = ScheduledSequence("c", (1, 2), 4, (8, 2), False, GREEDY, (0,) * 9, ())
    drafted = ScheduledSequence("d", (7,), 2, (3, 9), True, GREEDY, (), (), draft_ids=(5, 6))
    flat = flatten([drafted, chunk], block_size=4)
    assert flat.token_ids.tolist() == [7, 5, 6, 1, 2]
    assert flat.positions.tolist() == [2, 3, 4, 4, 5]
    assert flat.slot_mapping.tolist() == [3 * 4 + 2, 3 * 4 + 3, 9 * 4, 8, 9]
    assert flat.sample_rows.tolist() == [0, 1, 2]
    assert flat.decode_block_tables.tolist() == [[3, 9]] * 3
    assert flat.decode_context_lens.tolist() == [3, 4, 5]
    assert flat.prefill_context_lens.tolist() == [6]
    assert flat.prefill_cu_seqlens.tolist() == [0, 2]


def test_flatten_tells_a_prompt_s_tokens_from_those_behind_it() -> None:
    """A replay, whose run begins in the prompt, and a last token of a prompt that the prefix cache left over."""
    replay = ScheduledSequence("r", (1, 2, 3, 4), 2, (3, 9), True, GREEDY, (0,) * 4, (3, 4))
    tail = ScheduledSequence("t", (7,), 4, (8, 2), True, GREEDY, (0,) * 5, ())
    flat = flatten([replay, tail], block_size=4)
    assert flat.token_ids.tolist() == [3, 4, 1, 2, 7]
    assert flat.positions.tolist() == [4, 5, 2, 3, 4]
    assert flat.sample_rows.tolist() == [1, 4]
    assert flat.decode_block_tables.tolist() == [[3, 9]] * 2
    assert flat.decode_context_lens.tolist() == [5, 6]
    assert flat.prefill_context_lens.tolist() == [4, 5]
    assert flat.prefill_cu_seqlens.tolist() == [0, 2, 3]


@pytest.mark.parametrize("num_right", range(4))
def test_drafts_give_the_tokens_and_the_bits_of_steps_of_their_own(
    runner: TorchRunner, memory: np.ndarray, num_right: int
) -> None:
    """With penalties and log-probabilities, across a block's edge, beside another decode and a prefill."""
    params = SamplingParams(
        temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.4, num_logprobs=2, min_tokens=3
    )
    prompt = random_ids(6, 11)
    base = ScheduledSequence("s", tuple(prompt), 0, (1, 2, 3), True, params, tuple(prompt), ())
    [(first,)] = runner.execute(Batch((base,)))
    plain = [first]
    for position in range(6, 10):
        output_ids = tuple(token.token_id for token in plain)
        step = base._replace(token_ids=output_ids[-1:], start=position, output_ids=output_ids)
        plain += runner.execute(Batch((step,)))[0]
    blocks = memory.reshape(NUM_BLOCKS, -1)
    expected_kv = blocks[[1, 2, 3]].copy()
    blocks[[5, 6]] = blocks[[1, 2]]
    right = tuple(token.token_id for token in plain[1 : 1 + num_right])
    drafts = (*right, *((token.token_id + 1) % 96 for token in plain[1 + num_right : 4]))
    drafted = base._replace(
        token_ids=(first.token_id,),
        start=6,
        block_table=(5, 6, 7),
        output_ids=(first.token_id,),
        draft_ids=drafts,
    )
    others = (scheduled(random_ids(5, 12), 0, (10, 11)), scheduled(random_ids(1, 13), 0, (12,)))
    drawn = runner.execute(Batch((others[0], drafted, others[1])))
    assert drawn[1] == tuple(plain[1 : 2 + num_right])
    num_slots = 7 + num_right
    ours, theirs = (tokens_of_blocks(blocks[[5, 6, 7]]), tokens_of_blocks(expected_kv))
    np.testing.assert_array_equal(ours[:, :num_slots], theirs[:, :num_slots])


def tokens_of_blocks(blocks: np.ndarray) -> np.ndarray:
    """[blocks, layers * 2 * heads * block_size * head_dim] of float32 to [layers * 2 * heads, tokens, head_dim]."""
    heads = blocks.view(np.float32).reshape(len(blocks), -1, BLOCK_SIZE, HEAD_DIM)
    return heads.transpose(1, 0, 2, 3).reshape(heads.shape[1], -1, HEAD_DIM)


def test_results_come_in_the_batchs_order(runner: TorchRunner, reference: tuple[Path, Any]) -> None:
    """Tokens behind a prompt are computed first, whatever their place."""
    prompts = [random_ids(9, 1), random_ids(1, 2), random_ids(6, 3), random_ids(1, 4)]
    batch = [scheduled(p, 0, range(4 * i, 4 * i + 3))._replace(sample=i != 2) for i, p in enumerate(prompts)]
    tokens = [[token.token_id for token in drawn] for drawn in runner.execute(Batch(tuple(batch)))]
    expected = [reference_greedy(reference[1], p, 1)[0] for p in prompts]
    assert tokens == [expected[:1], expected[1:2], [], expected[3:]]


def test_copies_happen_before_the_batch_is_computed(
    runner: TorchRunner, memory: np.ndarray, reference: tuple[Path, Any]
) -> None:
    prompt = random_ids(8, 5)
    blocks = memory.reshape(NUM_BLOCKS, -1)
    runner.execute(Batch((scheduled(prompt[:6], 0, (1, 2)),)))
    shared = blocks[2].copy()
    [(copied,)] = runner.execute(Batch((scheduled(prompt[6:], 6, (1, 5)),), copies=(BlockCopy(2, 5),)))
    assert copied.token_id == reference_greedy(reference[1], prompt, 1)[0]
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
    [(continued,)] = other.execute(Batch((scheduled([first], 10, (20, 11, 2)),)))
    assert continued.token_id == second


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
