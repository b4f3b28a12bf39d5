"""Pods of several processes: they exchange KV with pods of one, and end as a whole."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis.asyncio

from engine.batch import Batch
from engine.checkpoint import model_info
from engine.kv_format import kv_block_bytes
from engine.runner import TorchRunner
from pod.errors import StartupError
from pod.plan import resolve
from pod.settings import PodSettings
from proto.errors import InternalError
from proto.registry import pod_key
from proto.registry_pb2 import PodRecord
from tests.engine.tiny_llama import make_checkpoint, random_ids, scheduled
from tests.support.pod_client import PodClient, generate, spec
from tests.support.processes import PodProcess

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_OUTPUT = 12
WAIT_S = 30.0
ENDLESS: dict[str, Any] = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "stop_token_ids": []}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor-parallel") / "tiny"
    make_checkpoint(folder)
    return folder


class Pods:
    """Starts pods of the tiny model as processes of one cluster."""

    def __init__(self, stack: AsyncExitStack, model: Path, registry_url: str, runtime_dir: Path, cluster: str) -> None:
        self._stack = stack
        self._registry_url = registry_url
        self._cluster = cluster
        self._flags: dict[str, Any] = {
            "model": model,
            "dtype": "float32",
            "runtime_dir": runtime_dir,
            "registry_url": registry_url,
            "cluster": cluster,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": 4,
            "num_threads": 1,
            "heartbeat_interval_s": 0.2,
        }

    async def start(self, role: str, tensor_parallel: int) -> tuple[PodProcess, PodClient]:
        pod = PodProcess(role, tensor_parallel=tensor_parallel, **self._flags)
        await self._stack.enter_async_context(pod)
        client = PodClient((await pod.until_ready())["address"])
        self._stack.push_async_callback(client.close)
        if role == "decode":
            await client.open_stream(await self.record(pod))
        return pod, client

    async def record(self, pod: PodProcess) -> PodRecord:
        """Waits for it: on a busy machine a heartbeat comes later than its predecessor expires."""
        async with redis.asyncio.from_url(self._registry_url) as registry, asyncio.timeout(WAIT_S):
            key = pod_key(self._cluster, pod.fields["pod_id"])
            while not isinstance(stored := await registry.get(key), bytes):  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)
        return PodRecord.FromString(stored)

    async def fingerprint(self, pod: PodProcess) -> str:
        return (await self.record(pod)).layout.fingerprint


@pytest.fixture
async def pods(
    tiny: Path, registry_url: str, runtime_dir: Path, request: pytest.FixtureRequest, no_leaked_tasks: None
) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:
        yield Pods(stack, tiny, registry_url, runtime_dir, request.node.name.partition("[")[0])


def right_answer(model: Path, prompt: list[int]) -> list[int]:
    """By one process."""
    memory = np.zeros(NUM_BLOCKS * kv_block_bytes(model_info(model, "float32"), BLOCK_SIZE), np.uint8)
    runner = TorchRunner(model, kv_memory=memory, block_size=BLOCK_SIZE, dtype="float32", num_threads=1)
    tokens, blocks = list(prompt), range(1, NUM_BLOCKS)
    for start in (0, *range(len(prompt), len(prompt) + NUM_OUTPUT - 1)):
        ((token,),) = runner.execute(Batch((scheduled(tokens[start:], start, blocks),)))
        tokens.append(token.token_id)
    return tokens[len(prompt) :]


async def test_kv_moves_from_a_pod_of_two_processes_to_one_of_one(pods: Pods, tiny: Path) -> None:
    """Then a rank dies while the pod computes nothing: it ends all the same."""
    (wide, prefill), (narrow, decode) = await asyncio.gather(pods.start("prefill", 2), pods.start("decode", 1))
    fingerprint = await pods.fingerprint(wide)
    assert fingerprint == await pods.fingerprint(narrow)
    prompt = random_ids(23)
    sequence = spec(prompt, **ENDLESS)
    assert await generate(sequence, prefill, decode, fingerprint) == right_answer(tiny, prompt)
    (rank,) = ranks(wide)
    rank.send_signal(signal.SIGKILL)
    assert await wide.ended() == 1
    assert f"the engine crashed: rank 1 (process {rank.pid}) was killed by SIGKILL\n" in wide.stderr
    assert "Traceback" not in wide.stderr


async def test_a_rank_that_dies_in_mid_answer_ends_the_pod(pods: Pods) -> None:
    pod, client = await pods.start("decode", 2)
    sequence = spec(random_ids(23), **ENDLESS | {"max_tokens": 100})
    await client.start_decode(sequence)
    await client.received[sequence.sequence_id].until_tokens(3)
    (rank,) = ranks(pod)
    rank.send_signal(signal.SIGKILL)
    await client.received[sequence.sequence_id].until_ended()
    reason = f"the engine crashed: rank 1 (process {rank.pid}) was killed by SIGKILL"
    error = client.received[sequence.sequence_id].error()
    assert isinstance(error, InternalError)
    assert error.message == reason
    assert await pod.ended() == 1
    assert f"{reason}\n" in pod.stderr
    assert "Traceback" not in pod.stderr
    assert "pair.cc" not in pod.stderr


async def test_a_pod_that_is_stopped_ends_its_ranks(pods: Pods) -> None:
    pod, _ = await pods.start("prefill", 2)
    (rank,) = ranks(pod)
    pod.send(signal.SIGTERM)
    assert await pod.ended() == 0
    assert not rank.is_running()


def ranks(pod: PodProcess) -> list[psutil.Process]:
    """All but the first."""
    return psutil.Process(pod.process.pid).children()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 5}, "tensor_parallel = 5: this model takes 1 to 4, its num_attention_heads"),
        ({"tensor_parallel": 2, "transfer_backend": "inproc"}, "transfer_backend must be shm, not inproc"),
        ({"tensor_parallel": 2, "model": "fake"}, "tensor_parallel = 2: the fake engine is one process"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(changes: dict[str, object], message: str, tiny: Path) -> None:
    settings = PodSettings.model_validate({"model": str(tiny), "num_blocks": NUM_BLOCKS} | changes)
    with pytest.raises(StartupError, match=message):
        resolve(settings, "prefill")


def test_ranks_divide_the_pods_threads(tiny: Path) -> None:
    settings = PodSettings.model_validate(
        {"model": str(tiny), "num_blocks": NUM_BLOCKS, "num_threads": 7, "tensor_parallel": 3}
    )
    assert resolve(settings, "decode").num_threads == 2
