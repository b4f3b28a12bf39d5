"""Settings of the commands. `up` and `demo` share the file section "pdserve"; pods, router and gateway read theirs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from proto.settings import Address, LogLevel, ModelName, Name, Port, Settings, split_config

DEFAULT_MODEL = "smollm2-135m-instruct"
ROUTER_PORT = 50051
HTTP_PORT = 8000


class StackSettings(Settings):
    """What to run on this machine. An option left unset is the pod's own default (or its value in --config FILE)."""

    section: ClassVar[str] = "pdserve"

    config: Path | None = Field(None, description="YAML file with sections pdserve, pod, router and gateway")
    prefill: int = Field(1, ge=0, le=64, description="number of prefill pods")
    decode: int = Field(1, ge=1, le=64, description="number of decode pods")
    colocated: bool = Field(False, description="no prefill pods: decode pods compute their prompts themselves")
    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="a known model name, a Hugging Face directory or a GGUF file"
    )
    served_model_name: ModelName = Field("", description="the model's name in the APIs; empty: its own")
    engine: Literal["torch", "fake"] = Field(
        "torch", description="fake needs no model; its answers can be computed by hand"
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(None, description="auto: bfloat16 where it is native")
    kv_dtype: Literal["auto", "bf16", "bfloat16", "int8", "fp8"] | None = Field(
        None, description="of the KV cache; auto: as dtype"
    )
    quantization: Literal["none", "int8", "int4", "gguf"] | None = Field(
        None, description="weights: int8, int4, a GGUF file's own blocks, or as the checkpoint has them (none)"
    )
    kv_memory: ByteSize | None = Field(None, gt=0, description="KV cache of each pod, such as 512MiB")
    max_num_seqs: int | None = Field(None, ge=1, description="sequences a pod runs at once")
    max_batched_tokens: int | None = Field(None, ge=1, description="tokens a pod computes in one step")
    speculation: Literal["off", "ngram", "draft"] | None = Field(
        None,
        description="decode pods guess tokens and verify several a step: from the text so far, or by --draft-model",
    )
    draft_model: str = Field("", description="a smaller model of the same vocabulary, for --speculation draft")
    tensor_parallel: int | None = Field(None, ge=1, le=64, description="processes that share the model in each pod")
    num_threads: int | None = Field(
        None, ge=1, description="threads of each pod; unset: the cores divided among the pods"
    )
    pin: bool = Field(True, description="give each pod cores of its own where there are enough")
    front: Literal["together", "apart"] = Field(
        "together", description="router and gateway in one process, which saves a hop a token, or in two"
    )
    host: str = Field("127.0.0.1", description="address the router and the gateway listen on")
    port: Port = Field(HTTP_PORT, description="OpenAI HTTP; 0: a free port")
    router_port: Port = Field(ROUTER_PORT, description="router gRPC; 0: a free port")
    registry_url: str = Field("", description="a Redis to use; empty: start one for this stack alone")
    cluster: Name = Field("default", description="separates stacks that share a registry")
    run_dir: Path | None = Field(None, description="logs and sockets; unset: a new one under the temporary directory")
    start_timeout_s: float = Field(180.0, gt=0, description="how long each process may take to become ready")
    drain_timeout_s: int = Field(5, ge=0, description="how long running answers may take when the stack stops")
    log_level: LogLevel = Field("info", description="of all processes")

    @model_validator(mode="after")
    def _colocated_means_no_prefill_pods(self) -> Self:
        if self.colocated and self.prefill and "prefill" in self.model_fields_set:
            raise ValueError(
                f"colocated and prefill = {self.prefill}: a colocated stack has no prefill pods: give one of them"
            )
        return self

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """As Settings.load; keeps the file's absolute name, since the processes of the stack read it too."""
        config, _ = split_config(sys.argv[1:] if argv is None else argv)
        return super().load(argv).model_copy(update={"config": config.resolve() if config else None})

    @property
    def num_prefill(self) -> int:
        return 0 if self.colocated else self.prefill


class UpSettings(StackSettings):
    """Run registry, router, gateway and pods in the foreground until Ctrl-C."""

    model_config = SettingsConfigDict(cli_prog_name="python -m pdserve up")


class DemoSettings(StackSettings):
    """Stream one answer through a prefill pod, a KV transfer and a decode pod, and show where its time went."""

    model_config = SettingsConfigDict(cli_prog_name="python -m pdserve demo")

    port: Port = Field(0, description="OpenAI HTTP; 0: a free port")
    router_port: Port = Field(0, description="router gRPC; 0: a free port")
    kv_memory: ByteSize | None = Field(ByteSize(256 << 20), gt=0, description="KV cache of each pod, such as 512MiB")
    prompt: str = Field("Why is the sky blue? Answer in a few sentences.", min_length=1, description="what to ask")
    max_tokens: int = Field(160, ge=1, description="longest answer")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    started_at: float | None = Field(
        None, description="Unix time of the command that led here, for its time to first token"
    )


class ExplainSettings(Settings):
    """Show where a past request spent its time, as the running router recorded it."""

    section: ClassVar[str] = "explain"
    model_config = SettingsConfigDict(cli_prog_name="python -m pdserve explain")

    request_id: CliPositionalArg[str] = Field("", description="as in the answer's id; empty: the last request")
    router: Address = Field(f"127.0.0.1:{ROUTER_PORT}", description="host:port of the router's gRPC server")


class ModelSettings(Settings):
    """Fetch and convert a model once, and say where it lies."""

    section: ClassVar[str] = "model"
    model_config = SettingsConfigDict(cli_prog_name="python -m pdserve model")

    model: CliPositionalArg[str] = Field(
        DEFAULT_MODEL, min_length=1, description="a known name, a Hugging Face directory or a GGUF file"
    )


class DoctorSettings(Settings):
    """Check that this machine can run a stack."""

    section: ClassVar[str] = "doctor"
    model_config = SettingsConfigDict(cli_prog_name="python -m pdserve doctor")

    model: str = Field(DEFAULT_MODEL, min_length=1, description="the model that is to run")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(HTTP_PORT, description="OpenAI HTTP")
    router_port: Port = Field(ROUTER_PORT, description="router gRPC")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
