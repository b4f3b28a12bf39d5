"""`python -m pdserve doctor`: what this machine has and lacks, one line each."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from engine.checkpoint import CheckpointError, estimate_memory_bytes, resolve_dtype, resolve_model
from pdserve import checks
from pdserve.checks import Check
from pdserve.prepare import ASSUMED_KV_BYTES
from pdserve.settings import DoctorSettings


def main(settings: DoctorSettings) -> int:
    """0 when a stack of one prefill and one decode pod can run here, else 1."""
    console = Console(highlight=False)
    results = [*machine_checks(settings), *model_checks(settings.model)]
    for check in results:
        mark = "[green]ok  [/]" if check.ok else "[red]FAIL[/]"
        advice = f": {check.advice}" if check.advice else ""
        console.print(f"{mark} {check.name:<14} {escape(check.detail + advice)}", soft_wrap=True)
    return 0 if all(check.ok for check in results) else 1


def machine_checks(settings: DoctorSettings) -> list[Check]:
    return [
        checks.check_python(),
        checks.check_names(),
        checks.check_compiler(),
        checks.check_cpu(),
        checks.check_shared_memory(),
        checks.check_registry_binary(),
        checks.check_port("port", settings.host, settings.port, "--port"),
        checks.check_port("router port", settings.host, settings.router_port, "--router-port"),
    ]


def model_checks(name: str) -> list[Check]:
    """Whether the model is there (converting it when it was not yet), and whether two pods of it fit into memory."""
    try:
        path = resolve_model(name)
        dtype = resolve_dtype("auto")
        needed_bytes = 2 * (estimate_memory_bytes(path, dtype) + ASSUMED_KV_BYTES)
    except CheckpointError as error:
        return [Check("model", str(error), "or pass --model PATH")]
    memory = checks.check_memory(needed_bytes, checks.available_memory_bytes(), f"two pods in {dtype}")
    return [Check("model", str(path)), memory]
