"""From settings to the processes of a stack: pure, nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.process import ProcessSpec
from pdserve.settings import StackSettings
from pod.cores import format_cores

REGISTRY, ROUTER, GATEWAY, FRONT = "registry", "router", "gateway", "router+gateway"
READY = "READY "

# All but the registry load side by side. The stop follows a request's way, so that nobody loses a peer it still needs.
REGISTRY_STARTS, REST_STARTS = 0, 1
GATEWAY_STOPS, ROUTER_STOPS, PODS_STOP, REGISTRY_STOPS = 0, 1, 2, 3

STOP_GRACE_S = 5.0
KILL_MARGIN_S = 3.0  # past a process's own drain timeout

# No process of a stack may reach out to a model hub; the router's tokeniser and torch share cores with the pods. gRPC's
# event engine passes each message on from thread to thread: some ten wake-ups a token on cores that are computing. With
# the poller before it, the thread that waits for a message takes it off the socket.
BASE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was resolved before anything starts: absolute paths, real ports, divided cores."""

    settings: StackSettings
    model: str
    draft_model: str = ""  # empty: the pods' own setting
    run_dir: Path
    port: int
    router_port: int
    threads_per_pod: int
    pod_cores: Sequence[str]  # for each pod, prefill first, what its --cores takes; empty: any
    registry_binary: Path | None  # None: settings.registry_url names a running one

    @property
    def registry_url(self) -> str:
        return self.settings.registry_url or f"unix://{self.run_dir}/registry.sock"

    @property
    def http_address(self) -> str:
        return f"{self.settings.host}:{self.port}"

    @property
    def router_process(self) -> str:
        """The name of the process that the router is in."""
        return FRONT if self.settings.front == "together" else ROUTER

    @property
    def router_address(self) -> str:
        return f"{self.settings.host}:{self.router_port}"


def threads_per_pod(num_cores: int, num_pods: int) -> int:
    """An equal share of the cores, so that pods computing at once do not take turns on one core."""
    return max(1, num_cores // num_pods)


def divide_cores(cores: Sequence[int], num_pods: int, threads: int) -> tuple[str, ...]:
    """Cores of its own for each thread of each pod; where they do not suffice, every pod may use any core ("")."""
    if num_pods * threads > len(cores):
        return ("",) * num_pods
    return tuple(format_cores(cores[i * threads : (i + 1) * threads]) for i in range(num_pods))


def process_specs(plan: Plan) -> list[ProcessSpec]:
    """Every process of the stack, in the order in which people want to read of them."""
    registry = [_registry(plan, plan.registry_binary)] if plan.registry_binary else []
    num_prefill = plan.settings.num_prefill
    prefill = [_pod(plan, "prefill", i, cores) for i, cores in enumerate(plan.pod_cores[:num_prefill])]
    decode = [_pod(plan, "decode", i, cores) for i, cores in enumerate(plan.pod_cores[num_prefill:])]
    front = [_together(plan)] if plan.settings.front == "together" else [_router(plan), _gateway(plan)]
    return [*registry, *prefill, *decode, *front]


def _registry(plan: Plan, binary: Path) -> ProcessSpec:
    # A UNIX socket: no port to collide on, and nobody else on the machine can write pod records.
    socket = plan.registry_url.removeprefix("unix://")
    options = {"port": "0", "unixsocket": socket, "unixsocketperm": "700", "save": "", "appendonly": "no"}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return ProcessSpec(
        name=REGISTRY,
        command=(str(binary), *flags),
        start_stage=REGISTRY_STARTS,
        stop_stage=REGISTRY_STOPS,
        ready_marker="Ready to accept connections",
        stop_grace_s=STOP_GRACE_S,
    )


def _pod(plan: Plan, role: str, index: int, cores: str) -> ProcessSpec:
    settings = plan.settings
    flags = {
        "host": "127.0.0.1",
        "port": 0,
        "cluster": settings.cluster,
        "registry-url": plan.registry_url,
        "runtime-dir": plan.run_dir / "kv",
        "model": plan.model,
        "engine": settings.engine,
        "num-threads": plan.threads_per_pod,
        "cores": cores or None,
        "drain-timeout-s": settings.drain_timeout_s,
        "log-level": settings.log_level,
        # In a shared registry another stack may have a pod of the same number: there pods draw their own names.
        "pod-id": f"{role}-{index}" if plan.registry_binary else None,
        "dtype": settings.dtype,
        "kv-dtype": settings.kv_dtype,
        "tensor-parallel": settings.tensor_parallel,
        "quantization": settings.quantization,
        "kv-memory": None if settings.kv_memory is None else int(settings.kv_memory),
        "max-num-seqs": settings.max_num_seqs,
        "max-batched-tokens": settings.max_batched_tokens,
    }
    if role == "decode":
        flags |= {"speculation": settings.speculation, "draft-model": plan.draft_model or None}
    return ProcessSpec(
        name=f"{role}-{index}",
        command=_python(plan, f"{role}_service", flags),
        start_stage=REST_STARTS,
        stop_stage=PODS_STOP,
        ready_marker=READY,
        stop_grace_s=settings.drain_timeout_s + KILL_MARGIN_S,
        env={**BASE_ENV, "OMP_NUM_THREADS": str(plan.threads_per_pod)},
    )


def _router(plan: Plan) -> ProcessSpec:
    return _front(ROUTER, _python(plan, "router", _router_flags(plan)), ROUTER_STOPS, STOP_GRACE_S)


def _gateway(plan: Plan) -> ProcessSpec:
    flags = _gateway_flags(plan) | {"router": plan.router_address}
    return _front(GATEWAY, _python(plan, "gateway", flags), GATEWAY_STOPS, _gateway_grace_s(plan))


def _together(plan: Plan) -> ProcessSpec:
    """Both in one process, which stops the gateway before the router."""
    flags = {f"router.{name}": value for name, value in _router_flags(plan).items()}
    flags |= {f"gateway.{name}": value for name, value in _gateway_flags(plan).items()}
    return _front(FRONT, _python(plan, "gateway.front", flags), GATEWAY_STOPS, _gateway_grace_s(plan) + STOP_GRACE_S)


def _router_flags(plan: Plan) -> dict[str, object]:
    settings = plan.settings
    return {
        "host": settings.host,
        "port": plan.router_port,
        "cluster": settings.cluster,
        "registry-url": plan.registry_url,
        "model": "fake" if settings.engine == "fake" else plan.model,
        "served-model-name": settings.served_model_name or None,
        "log-level": settings.log_level,
    }


def _gateway_flags(plan: Plan) -> dict[str, object]:
    settings = plan.settings
    return {
        "host": settings.host,
        "port": plan.port,
        "drain-timeout-s": settings.drain_timeout_s,
        "log-level": settings.log_level,
    }


def _gateway_grace_s(plan: Plan) -> float:
    return plan.settings.drain_timeout_s + KILL_MARGIN_S


def _front(name: str, command: tuple[str, ...], stop_stage: int, stop_grace_s: float) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=command,
        start_stage=REST_STARTS,
        stop_stage=stop_stage,
        ready_marker=READY,
        stop_grace_s=stop_grace_s,
        env={**BASE_ENV, "OMP_NUM_THREADS": "1"},
    )


def _python(plan: Plan, module: str, flags: dict[str, object]) -> tuple[str, ...]:
    """`python -m MODULE --flag value ...`; a flag that is None is left to the process's own settings."""
    given = [part for name, value in flags.items() if value is not None for part in (f"--{name}", str(value))]
    config = ["--config", str(plan.settings.config)] if plan.settings.config else []
    return (sys.executable, "-m", module, *given, *config)
