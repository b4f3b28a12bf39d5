"""From a plan to an engine over KV memory that peers can read. The slow part of a start: it loads the model."""

from __future__ import annotations

from pathlib import Path

from engine.batch import Runner
from engine.checkpoint import CheckpointError
from engine.core import EngineConfig, EngineCore
from engine.fake import FakeRunner
from kernels.cpu.build import BuildFailed, CompilerMissing, build
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.errors import nixlError
from pod.errors import StartupError
from pod.plan import PodPlan
from pod.speculation import make_proposer


def make_endpoint(plan: PodPlan) -> KVEndpoint:
    try:
        return KVEndpoint(
            plan.layout,
            plan.num_blocks,
            backend=plan.settings.transfer_backend,
            pod_id=plan.pod_id,
            epoch=plan.epoch,
            runtime_dir=plan.settings.runtime_dir,
        )
    except (OSError, MemoryError, nixlError) as error:
        raise StartupError(f"cannot set up {plan.settings.transfer_backend} transfers: {error}") from None


def build_engine(plan: PodPlan, endpoint: KVEndpoint) -> EngineCore:
    """Loads the model; takes seconds. Raises StartupError."""
    settings = plan.settings
    try:
        config = EngineConfig(
            block_size=settings.block_size,
            num_blocks=plan.num_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_batched_tokens=settings.max_batched_tokens,
            prefix_cache=settings.prefix_cache,
            num_draft_tokens=settings.num_draft_tokens,
        )
        runner = _runner(plan, endpoint)
        proposer = make_proposer(
            plan.speculation,
            settings,
            num_blocks=plan.num_blocks,
            generations=endpoint.generations,
            num_threads=plan.num_threads,
        )
        return EngineCore(runner, config, generations=endpoint.generations, proposer=proposer)
    except (CheckpointError, ValueError) as error:
        raise StartupError(str(error)) from None
    except MemoryError:
        raise StartupError("too little memory for the model's weights; free memory or choose a smaller model") from None


def _runner(plan: PodPlan, endpoint: KVEndpoint) -> Runner:
    settings = plan.settings
    if plan.model_dir is None:
        return FakeRunner(
            endpoint.kv_memory,
            settings.block_size,
            step_s=settings.fake_step_s,
            prefill_s_per_token=settings.fake_prefill_s_per_token,
        )
    return _torch_runner(plan, plan.model_dir, endpoint)


def _torch_runner(plan: PodPlan, model_dir: Path, endpoint: KVEndpoint) -> Runner:
    try:
        build()  # now, not within the first request
    except (CompilerMissing, BuildFailed) as error:
        text = str(error).splitlines()[0]
        raise StartupError(f"CPU kernels: {text} (`python -m kernels.cpu.build` shows all)") from None
    from engine.runner import TorchRunner  # noqa: PLC0415 - a pod with the fake engine never loads torch

    return TorchRunner(
        model_dir,
        kv_memory=endpoint.kv_memory,
        block_size=plan.layout.block_size,
        dtype=plan.model.dtype,
        num_threads=plan.num_threads,
    )
