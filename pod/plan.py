"""A pod's settings with nothing left open: the model found, the dtype chosen, the cache sized, the pod named."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.batch import ModelInfo
from engine.checkpoint import CheckpointError, estimate_memory_bytes, model_info, resolve_dtype, resolve_model
from engine.fake import FAKE_MODEL
from engine.kv_format import kv_block_bytes
from engine.model_config import read_config
from engine.shard import check_tensor_parallel
from kvtransfer.layout import KVLayout
from pod.errors import StartupError
from pod.settings import PodSettings
from pod.speculation import SpeculationPlan, resolve_speculation

AUTO_KV_BYTES = 1 << 30  # enough for 46,000 tokens of the default model
AUTO_KV_SHARE = 0.25  # of the memory that is left beside the model: several pods share a machine
USEFUL_TOKENS = 1024  # a prompt and its answer: with a smaller cache a pod says so
ANY_HOST = {"0.0.0.0", "::", ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """`settings` are as given; the other fields are what "auto" and unset ones became."""

    settings: PodSettings
    pod_id: str
    epoch: str  # new at every start of the process
    advertise_host: str
    engine: str
    model_dir: Path | None  # None: the fake engine needs none
    model: ModelInfo
    layout: KVLayout
    num_blocks: int
    num_threads: int  # of each of settings.tensor_parallel processes
    speculation: SpeculationPlan

    def describe(self) -> str:
        kv_mib = self.num_blocks * self.layout.block_bytes / 2**20
        return (
            f"pod_id={self.pod_id} epoch={self.epoch} engine={self.engine} model={self.model.model_id} "
            f"model_dir={self.model_dir} dtype={self.model.dtype} kv_dtype={self.model.kv_dtype} "
            f"quantization={self.settings.quantization} "
            f"num_threads={self.num_threads} tensor_parallel={self.settings.tensor_parallel} "
            f"cores={self.settings.cores or 'any'} "
            f"block_size={self.layout.block_size} num_blocks={self.num_blocks} kv_mib={kv_mib:.1f} "
            f"max_num_seqs={self.settings.max_num_seqs} max_batched_tokens={self.settings.max_batched_tokens} "
            f"speculation={self.speculation.describe()} "
            f"transfer_backend={self.settings.transfer_backend} runtime_dir={self.settings.runtime_dir} "
            f"layout={self.layout.fingerprint}"
        )

    @property
    def warnings(self) -> list[str]:
        """What is allowed and hardly wanted."""
        tokens = self.num_blocks * self.layout.block_size
        if tokens >= min(USEFUL_TOKENS, self.model.max_model_len):
            return []
        flag = "--num-blocks" if self.settings.num_blocks else "--kv-memory"
        return [f"the KV cache holds {tokens} tokens, longer requests are refused: raise {flag}"]


def resolve(settings: PodSettings, role: str) -> PodPlan:
    """Reads the checkpoint's header, not its weights. Raises StartupError."""
    _check_device(settings)
    engine = settings.engine if settings.engine != "auto" else "fake" if settings.model == "fake" else "torch"
    model_dir, model = (None, FAKE_MODEL) if engine == "fake" else _checkpoint(settings)
    if settings.tensor_parallel > 1:
        _check_tensor_parallel(settings, model_dir)
    layout = _layout(model, settings.block_size)
    speculation = resolve_speculation(settings, role, model_dir, model)
    free_bytes = _memory_beside_model(model_dir, model.dtype, settings)
    return PodPlan(
        settings=settings,
        pod_id=settings.pod_id or f"{role}-{secrets.token_hex(4)}",
        epoch=secrets.token_hex(8),
        advertise_host=settings.advertise_host
        or (socket.gethostname() if settings.host in ANY_HOST else settings.host),
        engine=engine,
        model_dir=model_dir,
        model=model,
        layout=layout,
        num_blocks=_num_blocks(
            settings, model, layout.block_bytes, speculation.block_bytes, free_bytes - speculation.model_bytes
        ),
        num_threads=max(1, (settings.num_threads or len(os.sched_getaffinity(0))) // settings.tensor_parallel),
        speculation=speculation,
    )


def _check_device(settings: PodSettings) -> None:
    """Raises StartupError."""
    if settings.device == "cuda":
        raise StartupError(
            "device = cuda: pods cannot serve from a GPU yet, because KV blocks move between them through host memory; "
            "use device = cpu (docs/gpu.md says what runs on a GPU)"
        )


def _checkpoint(settings: PodSettings) -> tuple[Path, ModelInfo]:
    try:
        model_dir = resolve_model(settings.model, quantization=settings.quantization)
        dtype = resolve_dtype(settings.dtype)
        info = model_info(model_dir, dtype, kv_dtype=settings.kv_dtype, quantization=settings.quantization)
        return model_dir, info
    except CheckpointError as error:
        raise StartupError(str(error)) from None


def _check_tensor_parallel(settings: PodSettings, model_dir: Path | None) -> None:
    """Raises StartupError."""
    if model_dir is None:
        raise StartupError(f"tensor_parallel = {settings.tensor_parallel}: the fake engine is one process")
    if settings.transfer_backend != "shm":
        raise StartupError(
            f"tensor_parallel = {settings.tensor_parallel}: its processes share the KV memory, "
            f"so transfer_backend must be shm, not {settings.transfer_backend}"
        )
    try:
        check_tensor_parallel(read_config(model_dir), settings.tensor_parallel)
    except ValueError as error:
        raise StartupError(str(error)) from None


def _layout(model: ModelInfo, block_size: int) -> KVLayout:
    return KVLayout(
        model_id=model.model_id,
        weights_revision=model.weights_revision,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        block_bytes=kv_block_bytes(model, block_size),
    )


def _memory_beside_model(model_dir: Path | None, dtype: str, settings: PodSettings) -> int:
    """Bytes; negative when not even the model fits."""
    if model_dir is None:
        return int(psutil.virtual_memory().available)
    needed = estimate_memory_bytes(model_dir, dtype, settings.tensor_parallel, settings.quantization)
    return int(psutil.virtual_memory().available) - needed


def _num_blocks(
    settings: PodSettings, model: ModelInfo, block_bytes: int, draft_block_bytes: int, free_bytes: int
) -> int:
    """As many as the settings say; the draft model's KV comes on top of what is given for the model's own."""
    enough = settings.max_num_seqs * -(-model.max_model_len // settings.block_size)
    auto_bytes = min(AUTO_KV_BYTES, int(AUTO_KV_SHARE * max(0, free_bytes)), enough * block_bytes)
    num_blocks = settings.num_blocks or (settings.kv_memory or auto_bytes) // block_bytes
    if settings.kv_memory and num_blocks < 1:
        raise StartupError(
            f"--kv-memory {settings.kv_memory:d} bytes: must be at least {block_bytes} bytes, one KV block"
        )
    needed_bytes = max(1, num_blocks) * (block_bytes + draft_block_bytes)
    if num_blocks < 1 or needed_bytes > free_bytes:
        raise StartupError(
            f"too little memory: {needed_bytes / 2**20:.0f} MiB of KV blocks do not fit into the "
            f"{free_bytes / 2**20:.0f} MiB left beside the model; lower --kv-memory or --num-blocks"
        )
    return num_blocks
