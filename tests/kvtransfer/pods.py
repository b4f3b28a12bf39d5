"""A prefill pod and a decode pod reduced to their transfer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import numpy as np

from kvtransfer.backends.inproc import Faults, InprocBackend
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.layout import KVLayout
from kvtransfer.memory import Bytes
from kvtransfer.puller import Puller
from kvtransfer.reads import POLL_S
from proto import kv_pb2

LAYOUT = KVLayout(
    model_id="m",
    weights_revision="r",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    block_size=4,
    dtype="int64",
    kv_dtype="int64",
    block_bytes=512,
)
NUM_BLOCKS = 32
FIRST_GENERATION = 1000
P = ParamSpec("P")
T = TypeVar("T")


def make_handoff(
    blocks: Sequence[int], num_tokens: int, *, epoch: str = "e1", lease_ms: int = 60_000, layout: KVLayout = LAYOUT
) -> kv_pb2.KVHandoff:
    """Of blocks whose generation is still what `Source` gave them."""
    refs = [kv_pb2.BlockRef(block_id=b, generation=FIRST_GENERATION + b) for b in blocks]
    return kv_pb2.KVHandoff(
        sequence_id="seq",
        source_pod_id="prefill",
        source_epoch=epoch,
        source_address="address",
        layout_fingerprint=layout.fingerprint,
        groups=[kv_pb2.LayerGroup(first_layer=0, num_layers=layout.num_layers, blocks=refs)],
        num_tokens=num_tokens,
        lease_id="lease",
        lease_remaining_ms=lease_ms,
    )


class Clock:
    """Short sleeps, which are those of polling, move it on; longer ones wait until it got there. Nothing is real."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if seconds <= POLL_S:
            self._advance(seconds)
            await asyncio.sleep(0)
            return
        sleeper = (self.now + seconds, asyncio.get_running_loop().create_future())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1]
        finally:
            self._sleepers.remove(sleeper)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for wakes_at, future in self._sleepers:
            if wakes_at <= self.now and not future.done():
                future.set_result(None)


class Inline(Executor):
    """Instead of threads, which the clock, moved on by the loop alone, would run ahead of on a busy machine."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - who awaits the future hears of it
            future.set_exception(error)
        return future


def make_endpoint(
    pod_id: str, backend: str, runtime_dir: Path, epoch: str = "e1", layout: KVLayout = LAYOUT
) -> KVEndpoint:
    return KVEndpoint(layout, NUM_BLOCKS, backend=backend, pod_id=pod_id, epoch=epoch, runtime_dir=runtime_dir)


def fill(endpoint: KVEndpoint) -> None:
    """Block b holds bytes b + 1, and its generation is 1000 + b."""
    endpoint.kv_memory.reshape(endpoint.num_blocks, -1)[:] = np.arange(1, endpoint.num_blocks + 1)[:, None]
    endpoint.generations[:] = np.arange(FIRST_GENERATION, FIRST_GENERATION + endpoint.num_blocks)


@dataclass
class Pods:
    """`answer` is what the prefill pod's side channel says; None: it is unreachable, an Event: it never answers."""

    prefill: KVEndpoint
    decode: KVEndpoint
    puller: Puller
    clock: Clock
    answer: KVEndpoint | asyncio.Event | None

    async def fetch(self, address: str) -> kv_pb2.GetAgentMetadataResponse:
        assert address == "address"
        if isinstance(self.answer, asyncio.Event):
            await self.answer.wait()
        if not isinstance(self.answer, KVEndpoint):
            raise OSError("no route")
        return self.answer.describe()

    @property
    def faults(self) -> Faults:
        backend = self.decode.agent.backends["inproc"]
        assert isinstance(backend, InprocBackend)
        return backend.faults

    def local(self, block: int) -> Bytes:
        size = LAYOUT.block_bytes
        return self.decode.kv_memory[block * size : (block + 1) * size]

    def contents(self, *blocks: int) -> list[int | None]:
        """For each local block the source block that it holds; None: untouched. Fails on a mixture."""
        result: list[int | None] = []
        for block in blocks:
            values = set(self.local(block).tolist())
            assert len(values) == 1, f"local block {block} holds a mixture of {values}"
            result.append(values.pop() - 1 if values != {0} else None)
        return result


async def close_pods(pods: Pods) -> None:
    pods.puller.check_invariants()
    assert pods.puller.num_transfers == 0
    assert pods.puller.quarantined_block_ids == frozenset()
    await pods.puller.close()
    pods.decode.close()
    pods.prefill.close()


def make_pods(backend: str, runtime_dir: Path, max_transfers: int = 2) -> Pods:
    clock = Clock()
    prefill = make_endpoint("prefill", backend, runtime_dir)
    decode = make_endpoint("decode", backend, runtime_dir, "e9")
    fill(prefill)
    pods: Pods

    async def fetch(address: str) -> kv_pb2.GetAgentMetadataResponse:
        return await pods.fetch(address)

    with mock.patch("kvtransfer.puller.ThreadPoolExecutor", return_value=Inline()):
        puller = Puller(
            decode, fetch, max_transfers=max_transfers, timeout_s=5.0, settle_s=1.0, clock=clock, sleep=clock.sleep
        )
    pods = Pods(prefill, decode, puller, clock, prefill)
    return pods


async def soon(condition: Callable[[], object]) -> None:
    """Lets the loop run until it holds."""
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def notes(pods: Pods, count: int) -> list[tuple[int, str]]:
    """The next `count` notifications that the prefill pod gets."""
    got: list[tuple[int, str]] = []
    async with asyncio.timeout(20):
        while len(got) < count:
            got += [(n.action, n.lease_id) for n in pods.prefill.poll_notifications()]
            await asyncio.sleep(0.001)
    return got


def in_groups(handoff: kv_pb2.KVHandoff) -> kv_pb2.KVHandoff:
    """The same hand-off as one group a layer, so that it is read with two transfers."""
    blocks = list(handoff.groups[0].blocks)
    del handoff.groups[:]
    for layer in range(LAYOUT.num_layers):
        handoff.groups.add(first_layer=layer, num_layers=1, blocks=blocks)
    return handoff
