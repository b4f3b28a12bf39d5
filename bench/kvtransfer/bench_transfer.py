"""How fast a KV request moves between two processes, as a share of memcpy on the same machine in the same run.

    python -m bench.kvtransfer.bench_transfer [--rounds 30] [--json FILE]

Two requests: 360 scattered blocks of 48 KiB, and a 1,024-token prompt of SmolLM2-135M in this project's block-major
layout (64 blocks of 360 KiB). Each round times, one after the other so that noise meets all alike: memcpy of the very
same scattered blocks between two private buffers, block by block; one contiguous memcpy of as many bytes (which goes
past the caches and is out of reach for blocks); a posted READ; a whole pull with its generation check. Ratios are
medians over rounds. Bars: `BAR name value op threshold PASS|FAIL|NOT-RUN (why)`, one a line.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.arguments import new_file, positive
from bench.bars import Bar, report
from kvtransfer.descs import MemType, XferDescs
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.handles import XferHandle
from kvtransfer.layout import KVLayout
from kvtransfer.memory import Bytes, as_bytes
from kvtransfer.puller import Puller
from proto import kv_pb2

BAR_RATIO = 0.80
POOL_BYTES = 256 << 20

Times = tuple[float, float, float, float]  # ms: memcpy, contiguous memcpy, READ, pull


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    layout: KVLayout
    num_blocks: int  # of one request

    @property
    def pool_blocks(self) -> int:
        return POOL_BYTES // self.layout.block_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


def layout(num_layers: int, num_kv_heads: int) -> KVLayout:
    return KVLayout(
        model_id="bench",
        weights_revision="0",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        block_size=16,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_bytes=2 * num_layers * num_kv_heads * 16 * 64 * 2,
    )


CASES = (Case("kv_360x48KiB", layout(3, 4), 360), Case("kv_smollm2_1024_tokens", layout(30, 3), 64))


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    num_bytes: int
    memcpy_ms: float  # of the same blocks
    contiguous_ms: float
    read_ms: float
    pull_ms: float
    read_ratios: tuple[float, ...]  # of each round: memcpy by the READ
    pull_ratio: float
    contiguous_ratio: float  # contiguous_ms by the READ's

    @property
    def read_ratio(self) -> float:
        return statistics.median(self.read_ratios)


def own(case: Case, runtime_dir: str) -> None:
    """The other process: offers a full pool until its stdin ends."""
    endpoint = KVEndpoint(case.layout, case.pool_blocks, pod_id="owner", epoch="e", runtime_dir=Path(runtime_dir))
    with endpoint:
        endpoint.kv_memory[:] = 1
        print(endpoint.describe().SerializeToString().hex(), flush=True)
        sys.stdin.read()


@contextmanager
def owner(case: Case, runtime_dir: str) -> Iterator[kv_pb2.GetAgentMetadataResponse]:
    command = [sys.executable, "-m", "bench.kvtransfer.bench_transfer", "--owner", case.name, runtime_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield kv_pb2.GetAgentMetadataResponse.FromString(bytes.fromhex(process.stdout.readline().decode()))
        process.communicate()


def private_memory(num_bytes: int) -> Bytes:
    """Page-aligned and prefaulted."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return as_bytes(mmap.mmap(-1, num_bytes, flags=flags))


def timed(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return (time.perf_counter() - started_at) * 1e3


def read_handle(
    endpoint: KVEndpoint, peer: kv_pb2.GetAgentMetadataResponse, near: list[int], far: list[int]
) -> XferHandle:
    size = peer.block_bytes
    rows = [
        np.array([(base + block * size, size, 0) for block in blocks], np.uint64)
        for base, blocks in ((endpoint.kv_memory.ctypes.data, near), (peer.kv_base_address, far))
    ]
    near_descs, far_descs = (XferDescs(MemType.DRAM_SEG, r) for r in rows)
    return endpoint.agent.initialize_xfer("READ", near_descs, far_descs, peer.agent_name)


def make_handoff(case: Case, blocks: list[int]) -> kv_pb2.KVHandoff:
    refs = [kv_pb2.BlockRef(block_id=block) for block in blocks]
    return kv_pb2.KVHandoff(
        sequence_id="bench",
        source_pod_id="owner",
        source_epoch="e",
        layout_fingerprint=case.layout.fingerprint,
        groups=[kv_pb2.LayerGroup(num_layers=case.layout.num_layers, blocks=refs)],
        num_tokens=case.num_blocks * case.layout.block_size,
        lease_id="bench",
        lease_remaining_ms=600_000,
    )


async def measure(case: Case, rounds: int) -> Result:
    with tempfile.TemporaryDirectory() as runtime_dir, owner(case, runtime_dir) as peer:
        endpoint = KVEndpoint(case.layout, case.pool_blocks, pod_id="reader", epoch="e", runtime_dir=Path(runtime_dir))

        async def fetch(address: str) -> kv_pb2.GetAgentMetadataResponse:
            return peer

        with endpoint:
            puller = Puller(endpoint, fetch)
            times = await run_rounds(case, rounds, endpoint, puller, peer)
            await puller.close()
    return summarise(case, times)


async def run_rounds(
    case: Case, rounds: int, endpoint: KVEndpoint, puller: Puller, peer: kv_pb2.GetAgentMetadataResponse
) -> list[Times]:
    """After one round that is not counted. Raises RuntimeError when wrong bytes arrived."""
    rng = np.random.default_rng(0)
    near, far = (rng.permutation(case.pool_blocks)[: case.num_blocks].tolist() for _ in range(2))
    source, target = (private_memory(POOL_BYTES).ctypes for _ in range(2))
    size = case.layout.block_bytes
    spans = [(target.data + n * size, source.data + f * size) for n, f in zip(near, far, strict=True)]
    handoff = make_handoff(case, far)
    await puller.pull(handoff, near, 0)
    handle = read_handle(endpoint, peer, near, far)
    times = []
    for _ in range(rounds + 1):
        memcpy = timed(lambda: copy_blocks(spans, size))
        contiguous = timed(lambda: ctypes.memmove(target.data, source.data, case.num_bytes))
        read = timed(lambda: endpoint.agent.transfer(handle))
        started_at = time.perf_counter()
        await puller.pull(handoff, near, 0)
        times.append((memcpy, contiguous, read, (time.perf_counter() - started_at) * 1e3))
    got = endpoint.kv_memory.reshape(case.pool_blocks, -1)[near]
    if not (got == 1).all():
        raise RuntimeError(f"{case.name}: wrong bytes arrived")
    return times[1:]


def copy_blocks(spans: list[tuple[int, int]], num_bytes: int) -> None:
    for target, source in spans:
        ctypes.memmove(target, source, num_bytes)


def summarise(case: Case, times: list[Times]) -> Result:
    memcpy_ms, contiguous_ms, read_ms, pull_ms = (statistics.median(column) for column in zip(*times, strict=True))
    return Result(
        case=case.name,
        num_bytes=case.num_bytes,
        memcpy_ms=memcpy_ms,
        contiguous_ms=contiguous_ms,
        read_ms=read_ms,
        pull_ms=pull_ms,
        read_ratios=tuple(t[0] / t[2] for t in times),
        pull_ratio=statistics.median(t[0] / t[3] for t in times),
        contiguous_ratio=statistics.median(t[1] / t[2] for t in times),
    )


def bar(result: Result) -> Bar:
    return Bar(f"shm_{result.case}_to_memcpy", result.read_ratios, ">=", BAR_RATIO)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=30)
    parser.add_argument("--json", type=new_file, help="also write the results there")
    parser.add_argument("--owner", nargs=2, metavar=("CASE", "RUNTIME_DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.owner:
        name, runtime_dir = arguments.owner
        own(next(case for case in CASES if case.name == name), runtime_dir)
        return
    results = [asyncio.run(measure(case, arguments.rounds)) for case in CASES]
    for result in results:
        print(
            f"{result.case}: {result.num_bytes / 1e6:.1f} MB, memcpy {result.memcpy_ms:.2f} ms "
            f"(contiguous {result.contiguous_ms:.2f}), READ {result.read_ms:.2f} ms, ratio {result.read_ratio:.2f} "
            f"(contiguous {result.contiguous_ratio:.2f}), pull {result.pull_ms:.2f} ms, ratio {result.pull_ratio:.2f}"
        )
    report([bar(each) for each in results], arguments.json, results=[asdict(each) for each in results])


if __name__ == "__main__":
    main()
