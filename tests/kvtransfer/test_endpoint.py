"""What a pod offers to its peers, and which packages this layer may load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.agent import Agent, AgentConfig
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.errors import nixlBackendError
from kvtransfer.layout import KVLayout
from tests.kvtransfer.pods import LAYOUT


@pytest.mark.parametrize("backend", ["inproc", "shm"])
def test_a_peer_can_reach_all_blocks_and_generations(backend: str, runtime_dir: Path) -> None:
    with KVEndpoint(LAYOUT, 10, backend=backend, pod_id="p", epoch="e", runtime_dir=runtime_dir) as endpoint:
        answer = endpoint.describe()
        assert (answer.pod_id, answer.epoch, answer.agent_name) == ("p", "e", "p/e")
        assert KVLayout.from_proto(answer.layout) == LAYOUT
        assert (answer.num_blocks, answer.block_bytes) == (10, LAYOUT.block_bytes)
        assert endpoint.kv_memory.nbytes == 10 * LAYOUT.block_bytes
        peer = Agent("peer", AgentConfig(backends=[]))
        peer.create_backend(backend, {"runtime_dir": str(runtime_dir)} if backend == "shm" else {})
        name = peer.add_remote_agent(answer.agent_metadata)
        descs = peer.get_xfer_descs(
            [
                (answer.kv_base_address, 10 * answer.block_bytes, 0),
                (answer.generation_base_address, 10 * 8, 0),
            ],
            "DRAM",
        )
        assert peer.check_remote_metadata(name, descs)
        peer.close()


def test_memory_starts_as_zeroes_and_outlives_the_endpoint(runtime_dir: Path) -> None:
    with KVEndpoint(LAYOUT, 4, pod_id="p", epoch="e", runtime_dir=runtime_dir) as endpoint:
        memory, generations = endpoint.kv_memory, endpoint.generations
    assert not memory.any()
    memory[:] = 1
    generations[3] += 1
    assert generations.tolist() == [0, 0, 0, 1]


def test_bad_arguments(runtime_dir: Path) -> None:
    with pytest.raises(ValueError, match="num_blocks = 0"):
        KVEndpoint(LAYOUT, 0, pod_id="p", epoch="e", runtime_dir=runtime_dir)
    with pytest.raises(ValueError, match="backend = 'rdma'"):
        KVEndpoint(LAYOUT, 1, backend="rdma", pod_id="p", epoch="e", runtime_dir=runtime_dir)
    with pytest.raises(nixlBackendError, match="runtime_dir"):
        KVEndpoint(LAYOUT, 1, pod_id="p", epoch="e", runtime_dir=Path("/proc/version"))


def test_it_loads_neither_torch_nor_any_other_part_of_ours() -> None:
    code = (
        "import sys, kvtransfer.puller\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'kernels', 'engine', 'pod', 'router')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
