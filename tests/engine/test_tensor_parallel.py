"""Tensor parallelism with real processes: the answers of one process, and what happens when a rank dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from mmap import mmap
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from engine.checkpoint import DEFAULT_MODEL, model_info, resolve_model
from engine.core import EngineConfig, EngineCore, EngineFailed
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner, flatten
from engine.sequence import SamplingParams, SequenceSpec
from engine.tensor_parallel.errors import RankLost
from engine.tensor_parallel.team import Team
from engine.tensor_parallel.wire import pack, unpack
from tests.engine.tiny_families import WINDOW, make_family
from tests.engine.tiny_llama import BLOCK_SIZE, make_checkpoint, random_ids, scheduled
from tests.reference_outputs import reference_case

NUM_BLOCKS = 64
DTYPE = "float32"


@contextmanager
def pod(
    folder: Path, size: int, dtype: str = "float32", num_blocks: int = NUM_BLOCKS
) -> Iterator[tuple[TorchRunner, Team, np.ndarray]]:
    """The first rank's runner, the others, and their KV memory."""
    num_bytes = num_blocks * kv_block_bytes(model_info(folder, dtype), BLOCK_SIZE)
    fd = os.memfd_create("kv")
    os.ftruncate(fd, num_bytes)
    memory = np.frombuffer(mmap(fd, num_bytes), np.uint8)
    try:
        with Team(
            size, model_dir=folder, dtype=DTYPE, block_size=BLOCK_SIZE, num_threads=1, kv_fd=fd, kv_bytes=num_bytes
        ) as team:
            runner = TorchRunner(
                folder,
                kv_memory=memory,
                block_size=BLOCK_SIZE,
                dtype=DTYPE,
                num_threads=1,
                exchange=team.exchange,
            )
            team.connect()
            yield runner, team, memory
    finally:
        os.close(fd)


def alone(folder: Path) -> tuple[TorchRunner, np.ndarray]:
    memory = np.zeros(NUM_BLOCKS * kv_block_bytes(model_info(folder, DTYPE), BLOCK_SIZE), np.uint8)
    return TorchRunner(folder, kv_memory=memory, block_size=BLOCK_SIZE, dtype=DTYPE, num_threads=1), memory


def answers(runner: TorchRunner, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy, in chunks beside decodes."""
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_seqs=4, max_batched_tokens=16)
    core = EngineCore(runner, config)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(SequenceSpec(sequence_id=str(i), prompt_ids=tuple(prompt), params=params))
    tokens: list[list[int]] = [[] for _ in prompts]
    while core.has_work:
        for event in core.step():
            tokens[int(event.sequence_id)].append(event.token.token_id)
    core.check_invariants()
    return tokens


def test_a_batch_survives_the_wire() -> None:
    sequences = [scheduled((7,), 5, (3, 9)), scheduled((1, 2, 3), 4, (8, 2)), scheduled((4, 5), 0, (6,))]
    batch = flatten(sequences, BLOCK_SIZE)
    received = unpack(pack(batch))
    for field in fields(batch):
        ours, theirs = getattr(batch, field.name), getattr(received, field.name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "size"), [("llama 2", 4), ("qwen3-moe", 2)])
def test_answers_and_kv_are_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    """And the same bytes at each run."""
    make_family(tmp_path, name)
    prompts = [random_ids(3 * WINDOW, 1, vocab_size=300), random_ids(3, 2, vocab_size=300)]
    runner, memory = alone(tmp_path)
    expected = answers(runner, prompts, 8)
    runs = []
    with pod(tmp_path, size) as (first, team, shared):
        assert len(team.pids) == size - 1
        for _ in range(2):
            shared[:] = 0
            assert answers(first, prompts, 8) == expected
            runs.append(shared.copy())
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_allclose(runs[0].view(np.float32), memory.view(np.float32), atol=1e-4)


@pytest.mark.model
def test_the_real_model_over_two_processes_of_unlike_shares() -> None:
    """9 heads over 3 KV heads: 3 here, 6 there; token for token what transformers generates."""
    folder = resolve_model(DEFAULT_MODEL)
    cases = [reference_case(name) for name in ("english question", "33 tokens")]
    with pod(folder, 2) as (runner, _, _):
        count = 8
        assert answers(runner, [case.prompt_ids for case in cases], count) == [
            list(case.output_ids[:count]) for case in cases
        ]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("size", "death", "end"),
    [
        (2, signal.SIGKILL, "was killed by SIGKILL"),
        (3, signal.SIGKILL, "was killed by SIGKILL"),  # the last rank, which the one between ends with
        (2, signal.SIGSTOP, "did not answer within 5 s"),
    ],
)
def test_a_dead_or_frozen_rank_fails_the_engine(
    size: int, death: signal.Signals, end: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or after the time that a rank may be behind; it is blamed, not one that noticed."""
    monkeypatch.setattr("engine.tensor_parallel.team.EXCHANGE_TIMEOUT_S", 5.0)
    with pod(tiny, size) as (runner, team, _):
        core = EngineCore(runner, EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))
        params = SamplingParams(temperature=0.0, max_tokens=50)
        core.add(SequenceSpec(sequence_id="s", prompt_ids=tuple(random_ids(5)), params=params))
        core.step()
        os.kill(team.pids[-1], death)
        began = time.monotonic()
        blame = f"RankLost: rank {size - 1} (process {team.pids[-1]}) {end}"
        with pytest.raises(EngineFailed, match=f"{re.escape(blame)}$") as failure:
            core.step()
        assert failure.value.sequence_ids == ("s",)
        assert time.monotonic() - began < 20


def test_a_rank_that_cannot_load_is_named(tiny: Path) -> None:
    """The other ranks find no weights where the first one has them."""
    with (
        pytest.raises(RankLost, match=r"rank 1 \(process \d+\) ended with exit code 1$"),
        pod_without_weights(tiny) as team,
    ):
        team.connect()


def test_ranks_that_gave_up_blame_the_first_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for it and ended, while it was frozen itself. Here one that cannot load stands for them."""
    monkeypatch.setattr("engine.tensor_parallel.team.LOST_ANOTHER", 1)
    with pod_without_weights(tiny) as team:
        os.waitid(os.P_PID, team.pids[0], os.WEXITED | os.WNOWAIT)
        assert str(team.lost()) == "rank 0 (this process) did not answer within 60 s"


@contextmanager
def pod_without_weights(folder: Path) -> Iterator[Team]:
    fd = os.memfd_create("kv")
    (folder / "model.safetensors").unlink()
    try:
        with Team(
            2, model_dir=folder, dtype=DTYPE, block_size=BLOCK_SIZE, num_threads=1, kv_fd=fd, kv_bytes=4096
        ) as team:
            yield team
    finally:
        os.close(fd)


def test_ranks_end_with_the_first_one(tiny: Path) -> None:
    """However it dies: here by SIGKILL, its ranks idle."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.engine.test_tensor_parallel import pod\n"
        "with pod(Path(sys.argv[1]), 2) as (_, team, _):\n"
        "    print(*team.pids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    first = subprocess.Popen((sys.executable, "-c", program, str(tiny)), stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        others = [psutil.Process(int(pid)) for pid in first.stdout.readline().split()]
        assert len(others) == 1
    finally:
        first.kill()
        first.communicate()
    _, alive = psutil.wait_procs(others, timeout=10)
    assert not alive
