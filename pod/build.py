"""From a plan to an engine over KV memory that peers can read. The slow part of a start: it loads the model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.batch import Runner
from engine.checkpoint import CheckpointError
from engine.core import EngineConfig, EngineCore
from engine.fake import FakeRunner
from engine.tensor_parallel.errors import RankLost
from kernels.cpu.build import BuildFailed, CompilerMissing, build
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.errors import nixlError
from pod.errors import StartupError
from pod.plan import PodPlan
from pod.speculation import make_proposer

if TYPE_CHECKING:
    from engine.tensor_parallel.team import Team  # loads torch


@dataclass(frozen=True, slots=True)
class Engine:
    """team: the other processes of a tensor-parallel pod; close it after the core's last step."""

    core: EngineCore
    team: Team | None


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


def build_engine(plan: PodPlan, endpoint: KVEndpoint) -> Engine:
    """Loads the model; takes seconds. Raises StartupError; then no process is left."""
    settings = plan.settings
    with ExitStack() as undo:
        try:
            config = EngineConfig(
                block_size=settings.block_size,
                num_blocks=plan.num_blocks,
                max_num_seqs=settings.max_num_seqs,
                max_batched_tokens=settings.max_batched_tokens,
                prefix_cache=settings.prefix_cache,
                num_draft_tokens=settings.num_draft_tokens,
            )
            runner, team = _runner(plan, endpoint, undo)
            proposer = make_proposer(
                plan.speculation,
                settings,
                num_blocks=plan.num_blocks,
                generations=endpoint.generations,
                num_threads=plan.num_threads,
            )
            core = EngineCore(runner, config, generations=endpoint.generations, proposer=proposer)
        except (CheckpointError, ValueError, RankLost) as error:
            raise StartupError(str(error)) from None
        except MemoryError:
            raise StartupError(
                "too little memory for the model's weights; free memory or choose a smaller model"
            ) from None
        undo.pop_all()
        return Engine(core, team)


def _runner(plan: PodPlan, endpoint: KVEndpoint, undo: ExitStack) -> tuple[Runner, Team | None]:
    """`undo` gets what must be ended should a later step fail."""
    settings = plan.settings
    if plan.model_dir is None:
        fake = FakeRunner(
            endpoint.kv_memory,
            settings.block_size,
            step_s=settings.fake_step_s,
            prefill_s_per_token=settings.fake_prefill_s_per_token,
        )
        return fake, None
    return _torch_runner(plan, plan.model_dir, endpoint, undo)


def _torch_runner(plan: PodPlan, model_dir: Path, endpoint: KVEndpoint, undo: ExitStack) -> tuple[Runner, Team | None]:
    try:
        build()  # now, not within the first request
    except (CompilerMissing, BuildFailed) as error:
        text = str(error).splitlines()[0]
        raise StartupError(f"CPU kernels: {text} (`python -m kernels.cpu.build` shows all)") from None
    from engine.runner import TorchRunner  # noqa: PLC0415 - a pod with the fake engine never loads torch
    from engine.tensor_parallel.exchange import ALONE  # noqa: PLC0415 - likewise

    team = _team(plan, model_dir, endpoint, undo) if plan.settings.tensor_parallel > 1 else None
    runner = TorchRunner(
        model_dir,
        kv_memory=endpoint.kv_memory,
        block_size=plan.layout.block_size,
        dtype=plan.model.dtype,
        kv_dtype=plan.settings.kv_dtype,
        num_threads=plan.num_threads,
        quantization=plan.settings.quantization,
        exchange=team.exchange if team else ALONE,
    )
    if team:
        team.connect()
    return runner, team


def _team(plan: PodPlan, model_dir: Path, endpoint: KVEndpoint, undo: ExitStack) -> Team:
    """The other ranks, which now load their shares of the model."""
    from engine.tensor_parallel.team import Team  # noqa: PLC0415 - loads torch

    assert endpoint.kv_file is not None, "the plan has the shm backend"
    return undo.enter_context(
        Team(
            plan.settings.tensor_parallel,
            model_dir=model_dir,
            dtype=plan.model.dtype,
            kv_dtype=plan.settings.kv_dtype,
            quantization=plan.settings.quantization,
            block_size=plan.layout.block_size,
            num_threads=plan.num_threads,
            kv_fd=endpoint.kv_file,
            kv_bytes=endpoint.kv_memory.nbytes,
        )
    )
