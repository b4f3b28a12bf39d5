"""Every family's model in several shares, each on a thread of its own, against the whole of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import ScheduledSequence
from engine.checkpoint import model_info
from engine.kv_cache import kv_cache
from engine.kv_format import kv_block_bytes
from engine.model import Model
from engine.model_config import read_config
from engine.runner import flatten
from engine.shard import Shard
from engine.weights import load_weights
from kernels.flat_batch import FlatBatch
from tests.engine.tiny_families import RECIPES, WINDOW, make_family
from tests.engine.tiny_llama import BLOCK_SIZE, OurModel, random_ids, scheduled

TOLERANCE = 1e-4
NUM_BLOCKS = 64
TIMEOUT_S = 60.0
OTHER_SIZES = [
    ("llama 3", 4),
    ("llama 2", 3),
    ("llama 3", 3),
    ("qwen3-moe", 3),
    ("phi-3", 4),
]  # uneven shares, more ranks than KV heads


class Meeting:
    """Where `size` threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._slots: list[torch.Tensor] = [torch.empty(0)] * size

    def every(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._barrier.wait(TIMEOUT_S)
        self._slots[rank] = tensor
        self._barrier.wait(TIMEOUT_S)
        return list(self._slots)


class ThreadExchange:
    """engine.tensor_parallel.exchange.Exchange between threads; `sums` are what came of it."""

    def __init__(self, meeting: Meeting, shard: Shard) -> None:
        self._meeting = meeting
        self.shard = shard
        self.sums: list[torch.Tensor] = []

    def announce(self, batch: FlatBatch) -> None:
        """All threads have it."""

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        self.sums.append(torch.stack(self._meeting.every(self.shard.rank, partial)).sum(0))
        return self.sums[-1]

    def joined(self, part: torch.Tensor, width: int) -> torch.Tensor:
        whole = torch.cat(self._meeting.every(self.shard.rank, part), dim=1)
        assert whole.shape[1] == width
        return whole


class ShardedModel:
    """`size` shares of a checkpoint over one KV memory, as the processes of a pod have it."""

    def __init__(self, folder: Path, size: int, kv_dtype: str = "auto") -> None:
        config = read_config(folder)
        meeting = Meeting(size)
        self.exchanges = [ThreadExchange(meeting, Shard(rank, size)) for rank in range(size)]
        self._models = [Model.load(folder, "float32", exchange) for exchange in self.exchanges]
        info = model_info(folder, "float32", kv_dtype=kv_dtype)
        cache = kv_cache(np.zeros(NUM_BLOCKS * kv_block_bytes(info, BLOCK_SIZE), np.uint8), info, BLOCK_SIZE)
        shares = [exchange.shard.heads(config.num_heads, config.num_kv_heads) for exchange in self.exchanges]
        self._kv = [cache.of_heads(share.kv) for share in shares]

    def logits(self, *sequences: ScheduledSequence) -> torch.Tensor:
        """float32 [T, V] of every token of a batch."""
        flat = flatten(sequences, BLOCK_SIZE)
        flat = replace(flat, sample_rows=torch.arange(len(flat.token_ids)))
        with ThreadPoolExecutor(len(self._models)) as pool:
            results = list(pool.map(lambda model, kv: model.forward(flat, kv), self._models, self._kv))
        whole: torch.Tensor = results[0]
        return whole


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    for name in RECIPES:
        make_family(folder / name, name)
    return {name: folder / name for name in RECIPES}


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in RECIPES), *OTHER_SIZES])
def test_logits_equal_those_of_one_rank(name: str, size: int, checkpoints: dict[str, Path]) -> None:
    """Of a prompt in two chunks and of single tokens, beyond the window."""
    whole, sharded = OurModel(checkpoints[name]), ShardedModel(checkpoints[name], size)
    prompt = random_ids(3 * WINDOW, vocab_size=300)
    blocks = tuple(range(40, 20, -1))
    for start, end in ((0, 20), (20, 31), (31, 32), (32, 33)):
        step = scheduled(prompt[start:end], start, blocks)
        expected, logits = whole.logits(step), sharded.logits(step)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    first, *others = [exchange.sums for exchange in sharded.exchanges]
    for sums in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, sums, strict=True))


def test_a_tokens_logits_do_not_depend_on_the_batch(checkpoints: dict[str, Path]) -> None:
    """To the bit, as on one rank."""
    sharded = ShardedModel(checkpoints["llama 3"], 3)
    prompts = [random_ids(count, count, vocab_size=300) for count in (1, 9, 17)]
    alone = [sharded.logits(scheduled(prompt, 0, range(8 * i, 8 * i + 8))) for i, prompt in enumerate(prompts)]
    together = sharded.logits(*(scheduled(p, 0, range(8 * i + 30, 8 * i + 38)) for i, p in enumerate(prompts)))
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("name", ["llama 2", "phi-3", "qwen3 with biases"])
def test_a_share_of_a_matrix_is_a_view(name: str, checkpoints: dict[str, Path]) -> None:
    """Of the same memory as the whole one, so that the pods of a host share it; phi-3 has fused projections."""
    folder = checkpoints[name]
    config = read_config(folder)
    shares = [load_weights(folder, config, "float32", Shard(rank, 2)).layers[0] for rank in range(2)]
    first, second = (share.output.tensors[0] for share in shares)
    assert first.stride(0) == second.stride(0) == config.num_heads * config.head_dim
    assert (shares[0].output.bias is None) == (not config.output_bias)
    assert shares[1].output.bias is None
    assert len(shares[0].qkv.tensors) == 3


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
def test_ranks_write_their_heads_of_rounded_blocks(kv_dtype: str, checkpoints: dict[str, Path]) -> None:
    """Numbers and scales; a number may be the next one where sums differ in their last bits."""
    whole = OurModel(checkpoints["llama 3"], kv_dtype=kv_dtype)
    sharded = ShardedModel(checkpoints["llama 3"], 2, kv_dtype)
    step = scheduled(random_ids(33, vocab_size=300), 0, range(1, 20))
    torch.testing.assert_close(sharded.logits(step), whole.logits(step), atol=1e-2, rtol=0)
