"""`python -m pdserve up`: a stack in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve import checks
from pdserve.checks import require
from pdserve.console import Reporter
from pdserve.launcher import Stack, make_plan, run_directory, run_stack
from pdserve.model import FAKE, prepare_model
from pdserve.process import INTERRUPTED
from pdserve.settings import StackSettings, UpSettings
from pdserve.stack import Plan

ASSUMED_KV_BYTES = 128 << 20  # of a pod whose cache is sized by itself: enough for a few thousand tokens


def main(settings: UpSettings) -> int:
    reporter = Reporter()
    with run_directory(settings.run_dir) as run_dir:
        plan = prepare(settings, run_dir, reporter)
        code = asyncio.run(run_stack(plan, reporter, _until_interrupted))
    return 0 if code == INTERRUPTED else code  # Ctrl-C is how `up` ends


def prepare(settings: StackSettings, run_dir: Path, reporter: Reporter) -> Plan:
    """Checks the machine, converts the model where it must, and resolves the plan. Raises LaunchError."""
    require(checks.check_python(), checks.check_names(), checks.check_shared_memory())
    if settings.engine != FAKE:
        require(checks.check_compiler())
    if settings.registry_url:
        require(checks.check_registry(settings.registry_url))
    model = prepare_model(FAKE if settings.engine == FAKE else settings.model, settings.dtype, reporter)
    num_pods = settings.num_prefill + settings.decode
    needed_bytes = num_pods * (model.memory_bytes + (settings.kv_memory or ASSUMED_KV_BYTES))
    require(checks.check_memory(needed_bytes, checks.available_memory_bytes(), f"{num_pods} pods"))
    return make_plan(settings, model.path, run_dir)


async def _until_interrupted(stack: Stack) -> int:
    Console(highlight=False).print(endpoints(stack), soft_wrap=True)
    await asyncio.Event().wait()
    return 0


def endpoints(stack: Stack) -> Table:
    """Where everything listens, and the two commands that people want next."""
    plan = stack.plan
    grid = Table.grid(padding=(0, 2))
    grid.add_row("OpenAI HTTP", f"http://{plan.http_address}/v1")
    grid.add_row("router gRPC", plan.router_address)
    grid.add_row("registry", plan.registry_url)
    for process in stack.supervisor.processes:
        if metrics := process.ready_fields.get("metrics"):
            grid.add_row(process.spec.name, f"{process.ready_fields['address']}  metrics http://{metrics}/metrics")
    grid.add_row("logs", str(stack.log_dir))
    grid.add_row("stop", "Ctrl-C")
    return grid
