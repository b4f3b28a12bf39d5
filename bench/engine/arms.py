"""An arm: something that is measured, alive for a phase, at work only in its turn."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from bench.engine import llama_cpp, ours, vllm
from bench.engine.cases import CASES, NUM_STREAMS, PREFILL_LENGTHS, Measured, warm_up
from bench.engine.catalogue import CASE_ARMS, LLAMA_KINDS, OURS, VLLM_CHUNKS
from bench.engine.memory import resident
from bench.engine.paths import Peers
from bench.engine.servers import NotRun, Server, ServerSpec
from bench.engine.worker import Worker
from bench.engine.workload import requests
from engine.checkpoint import MODEL_PACKAGES, packaged_gguf


class Arm(Protocol):
    name: str

    async def start(self) -> None:
        """Raises NotRun; then nothing of it runs."""

    async def measure(self, case: str, number: int) -> Measured: ...
    def pids(self) -> Sequence[int]: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    async def stop(self) -> None: ...


class ServerArm:
    def __init__(self, spec: ServerSpec, log_dir: Path) -> None:
        self.name = spec.name
        self._server = Server(spec, log_dir)

    async def start(self) -> None:
        await self._server.start()
        await warm_up(self._server.endpoint)

    async def measure(self, case: str, number: int) -> Measured:
        if case == "memory":
            return {"memory.mb": self._memory_bytes() / 1e6}
        return await CASES[case](self._server.endpoint, number)

    def _memory_bytes(self) -> int:
        """Of ours: one pod with all that it maps. Of a peer: its processes together, shared pages counted once."""
        pool = self._server.spec.kv_pool_bytes(self._server.log_dir)
        processes = self._server.processes
        if self.name in OURS:
            return resident(p.pid for p in processes if ours.DECODE_POD in p.cmdline()).rss - pool
        return resident(p.pid for p in processes).pss - pool

    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._server.processes]

    def freeze(self) -> None:
        self._server.freeze()

    def thaw(self) -> None:
        self._server.thaw()

    async def stop(self) -> None:
        await self._server.stop()


class WorkerArm:
    """One that is no server: it answers over a pipe and sleeps between its turns."""

    def __init__(self, name: str, module: str, flags: Sequence[str], cores: frozenset[int], log_dir: Path) -> None:
        self.name = name
        command = (sys.executable, "-m", module, *flags, "--threads", str(len(cores)))
        self._worker = Worker(command, log_dir / f"{name}.log", {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})

    async def start(self) -> None:
        await self.measure("single", 0)

    async def measure(self, case: str, number: int) -> Measured:
        return await self._worker.call({"case": case})

    def pids(self) -> Sequence[int]:
        return self._worker.pids()

    def freeze(self) -> None:
        """It waits for its next line."""

    def thaw(self) -> None:
        """It was not frozen."""

    async def stop(self) -> None:
        await self._worker.stop()


class HfArm(WorkerArm):
    """transformers' generate: a static batch, so there is no server and no queue before it."""

    async def measure(self, case: str, number: int) -> Measured:
        if case == "single":
            timed = await self._generate("single", number, 1, 128, 128)
            return {"single.tok_s": 127 / (timed["total_s"] - timed["first_s"])}
        if case == "streams":
            timed = await self._generate("streams", number, NUM_STREAMS, 256, 128)
            return {"streams.tok_s": NUM_STREAMS * 128 / timed["total_s"]}
        found = {}
        for length in PREFILL_LENGTHS:
            timed = await self._generate(f"prefill{length}", number, 1, length, 1)
            found[f"prefill{length}.tok_s"] = length / timed["first_s"]
        return found

    async def _generate(self, case: str, number: int, count: int, length: int, max_tokens: int) -> dict[str, float]:
        prompts = [request.prompt for request in requests(case, number, count, length, max_tokens)]
        return await self._worker.call({"prompts": prompts, "max_tokens": max_tokens})


class Makers:
    """From an arm's name to the arm."""

    def __init__(self, peers: Peers | None, model: Path, run_dir: Path, cores: frozenset[int]) -> None:
        self._peers = peers
        self._model = model
        self._run_dir = run_dir
        self._log_dir = run_dir / "logs"
        self._cores = cores

    async def make(self, name: str) -> Arm:
        """Raises NotRun."""
        if name == "limits":
            return WorkerArm(name, "bench.engine.limits", (), self._cores, self._log_dir)
        if name == "hf_float32":
            flags = ("--model", str(self._model))
            return HfArm(name, "bench.engine.hf_generate", flags, self._cores, self._log_dir)
        return ServerArm(await self._spec(name), self._log_dir)

    async def _spec(self, name: str) -> ServerSpec:
        if name in OURS:
            return ours.spec(name, self._model, self._run_dir, self._cores)
        if self._peers is None:
            raise NotRun("no directory of peers was given (--peers DIR; make bench-peers DIR=...)")
        if name in LLAMA_KINDS:
            gguf = await asyncio.to_thread(_gguf, self._peers, LLAMA_KINDS[name])
            return llama_cpp.spec(name, self._peers, gguf, self._cores, slots_of(name))
        if name == "vllm_pd":
            return vllm.disaggregated(name, self._peers, self._model, self._cores)
        return vllm.colocated(name, self._peers, self._model, self._cores, VLLM_CHUNKS.get(name))


def slots_of(arm: str) -> int:
    """As many as the largest case that runs on `arm` needs, its warm-up apart, which queues."""
    return 1 if all(arm not in CASE_ARMS[case] for case in ("streams", "pd", "steady", "chunks")) else NUM_STREAMS


def _gguf(peers: Peers, kind: str) -> Path:
    """The default model as GGUF of `kind`. Its package brings Q4_1, from which our own checkpoint is made too."""
    (name,) = MODEL_PACKAGES
    packaged = packaged_gguf(name)
    return packaged if kind in packaged.name else llama_cpp.quantised(peers, packaged, kind)
