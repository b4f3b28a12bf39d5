"""The settings of one pod, prefill or decode. `pod/plan.py` resolves what is "auto" or unset here."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from pod.cores import format_cores, parse_cores
from proto.settings import LogLevel, Name, Port, Settings


def default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "pdserve" if base else Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"


class PodSettings(Settings):
    section: ClassVar[str] = "pod"

    host: str = Field("127.0.0.1", description="address to listen on")
    advertise_host: str = Field("", description="host that other processes reach this pod at; empty: host")
    port: Port = Field(0, description="gRPC port; 0 takes a free one")
    token_port: Port = Field(0, description="decode pods: port on which routers fetch tokens; 0 takes a free one")
    metrics_port: Port = Field(0, description="port of /metrics; 0 takes a free one")
    cluster: Name = Field("default", description="name of the deployment")
    registry_url: str = Field("redis://127.0.0.1:6379/0", description="URL of the Redis-protocol registry")
    pod_id: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$", max_length=128, description="empty: generated")
    heartbeat_interval_s: float = Field(1.0, gt=0, le=60, description="a record expires after three of these")
    drain_timeout_s: float = Field(30.0, ge=0, description="how long SIGTERM lets running work finish")
    log_level: LogLevel = Field("info", description="log level")

    model: str = Field("smollm2-135m-instruct", min_length=1, description="known name, directory, GGUF file or 'fake'")
    engine: Literal["auto", "torch", "fake"] = Field("auto", description="auto: fake for the model 'fake', else torch")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 where it is native")
    kv_dtype: Literal["auto", "bf16", "bfloat16", "int8", "fp8"] = Field(
        "auto", description="of the KV cache; auto: as dtype"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="cuda is refused: pods cannot serve from a GPU yet")
    quantization: Literal["none", "int8", "int4", "gguf"] = Field(
        "none", description="weights: int8, int4, a GGUF file's own blocks, or as the checkpoint has them"
    )
    cores: str = Field("", description="cores to run on, such as 0-3,8; empty: any")
    num_threads: int = Field(0, ge=0, description="compute threads; 0: one for each core this process may use")
    tensor_parallel: int = Field(1, ge=1, le=64, description="processes that share the model, and num_threads")
    block_size: int = Field(16, ge=1, le=1024, description="tokens a KV block")
    num_blocks: int | None = Field(None, ge=1, description="KV blocks; unset: from kv_memory")
    kv_memory: ByteSize | None = Field(
        None, gt=0, description="KV cache, such as 512MiB; unset: from the model and free memory"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences in one engine step")
    max_batched_tokens: int = Field(512, ge=1, description="tokens in one engine step")
    prefix_cache: bool = Field(True, description="reuse the KV of equal prefixes")

    speculation: Literal["off", "ngram", "draft"] = Field(
        "off", description="decode pods: guess tokens and verify several a step, by prompt lookup or a draft model"
    )
    draft_model: str = Field("", description="the model that drafts, of the same vocabulary: name, directory or GGUF")
    num_draft_tokens: int = Field(8, ge=1, le=32, description="most drafts of a sequence in a step; fewer when it pays")
    ngram_min: int = Field(2, ge=1, description="ngram: tokens that must have occurred before, at least")
    ngram_max: int = Field(4, ge=1, description="ngram: tokens that are looked up, at most")

    transfer_backend: Literal["shm", "inproc"] = Field("shm", description="how KV blocks move")
    runtime_dir: Path = Field(default_factory=default_runtime_dir, description="sockets of the transfer layer")

    fake_step_s: float = Field(0.0, ge=0, description="fake engine: seconds an engine step takes")
    fake_prefill_s_per_token: float = Field(0.0, ge=0, description="fake engine: seconds a prompt token takes")

    @field_validator("cores")
    @classmethod
    def _cores_are_readable(cls, value: str) -> str:
        return format_cores(parse_cores(value))

    @model_validator(mode="after")
    def _speculation_is_whole(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min = {self.ngram_min}: must be at most ngram_max = {self.ngram_max}")
        if self.draft_model and self.speculation != "draft":
            raise ValueError(f"draft_model = {self.draft_model}: has no effect unless speculation is draft")
        if self.speculation == "draft" and not self.draft_model:
            raise ValueError("speculation = draft: needs draft_model, or must be ngram or off")
        return self

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Self:
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ValueError("num_blocks and kv_memory both set the cache's size: give one of them")
        return self
