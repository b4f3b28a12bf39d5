"""Everything that can be wrong or slow before a process starts: the machine, the model, the kernels, the ports."""

from __future__ import annotations

import os
from pathlib import Path

from engine.checkpoint import model_info, resolve_dtype
from engine.kv_format import kv_block_bytes
from kernels.cpu.build import BuildFailed, CompilerMissing, build
from pdserve import checks
from pdserve.checks import LaunchError, require
from pdserve.console import Reporter
from pdserve.model import FAKE, Model, prepare_model
from pdserve.settings import StackSettings
from pdserve.stack import Plan, divide_cores, threads_per_pod
from pod.settings import PodSettings

ASSUMED_KV_BYTES = 128 << 20  # of a pod whose cache is sized by itself: enough for a few thousand tokens


def prepare(settings: StackSettings, run_dir: Path, reporter: Reporter) -> Plan:
    """Checks the machine, converts the model and compiles the kernels where it must. Raises LaunchError."""
    require(checks.check_python(), checks.check_names(), checks.check_shared_memory())
    if settings.registry_url:
        require(checks.check_registry(settings.registry_url))
    require(
        checks.check_ports_differ(settings.port, settings.router_port),
        checks.check_port("port", settings.host, settings.port, "--port"),
        checks.check_port("router port", settings.host, settings.router_port, "--router-port"),
    )
    draft = prepare_draft(settings, reporter)
    return make_plan(settings, prepare_engine(settings, reporter, draft.memory_bytes), run_dir, draft.path)


def prepare_draft(settings: StackSettings, reporter: Reporter) -> Model:
    """The draft model, converted where it must be; one of no name and no size if there is none. Raises LaunchError."""
    if (settings.speculation == "draft") != bool(settings.draft_model):
        raise LaunchError(
            f"--speculation {settings.speculation or 'off'} and --draft-model {settings.draft_model!r}: "
            "a draft model is needed for --speculation draft, and for nothing else"
        )
    return prepare_model(settings.draft_model, settings.dtype, reporter) if settings.draft_model else Model("", 0)


def prepare_engine(settings: StackSettings, reporter: Reporter, draft_bytes: int = 0) -> str:
    """The model to pass on: present, converted, small enough, with its kernels compiled. Raises LaunchError."""
    if FAKE in (settings.engine, settings.model):
        return FAKE
    model = prepare_model(
        settings.model, settings.dtype, reporter, settings.tensor_parallel or 1, settings.quantization or "none"
    )
    check_kv_memory(settings, Path(model.path))
    num_pods = settings.num_prefill + settings.decode
    needed_bytes = num_pods * (model.memory_bytes + (settings.kv_memory or ASSUMED_KV_BYTES))
    needed_bytes += settings.decode * draft_bytes
    require(checks.check_memory(needed_bytes, checks.available_memory_bytes(), f"{num_pods} pods"))
    prepare_kernels(reporter)
    return model.path


def check_kv_memory(settings: StackSettings, model: Path) -> None:
    """A pod would refuse it too, after a start. Raises LaunchError unless --kv-memory holds a block."""
    if settings.kv_memory is None:
        return
    quantization = settings.quantization or "none"
    dtype = resolve_dtype(settings.dtype or "auto")
    info = model_info(model, dtype, kv_dtype=settings.kv_dtype or "auto", quantization=quantization)
    smallest = kv_block_bytes(info, PodSettings.model_fields["block_size"].default)
    if settings.kv_memory < smallest:
        raise LaunchError(f"--kv-memory {settings.kv_memory:d} bytes: must be at least {smallest} bytes, one KV block")


def prepare_kernels(reporter: Reporter) -> None:
    """Compiles the CPU kernels unless they lie in the user's cache. Raises LaunchError."""
    try:
        with reporter.working("compiling the CPU kernels (once)"):
            build()
    except (CompilerMissing, BuildFailed) as error:
        raise LaunchError(str(error)) from None


def make_plan(settings: StackSettings, model: str, run_dir: Path, draft_model: str = "") -> Plan:
    """Resolves ports and cores."""
    cores, num_pods = sorted(os.sched_getaffinity(0)), settings.num_prefill + settings.decode
    threads = settings.num_threads or threads_per_pod(len(cores), num_pods)
    return Plan(
        settings=settings,
        model=model,
        draft_model=draft_model,
        run_dir=run_dir,
        port=settings.port or free_port(settings.host),
        router_port=settings.router_port or free_port(settings.host),
        threads_per_pod=threads,
        pod_cores=divide_cores(cores, num_pods, threads) if settings.pin else ("",) * num_pods,
        registry_binary=None if settings.registry_url else checks.registry_binary(),
    )


def free_port(host: str) -> int:
    """A port that is free now. It is chosen here, not by the server, so that a restarted server keeps its port."""
    with checks.bind(host, 0) as bound:
        port: int = bound.getsockname()[1]
        return port
