"""`python -m pdserve up`: a stack in the foreground."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.table import Table

from pdserve.console import Reporter
from pdserve.launcher import Stack, run_directory, run_stack
from pdserve.prepare import prepare
from pdserve.process import INTERRUPTED, endpoint
from pdserve.settings import UpSettings


def main(settings: UpSettings) -> int:
    reporter = Reporter()
    with run_directory(settings.run_dir) as run_dir:
        plan = prepare(settings, run_dir, reporter)
        code = asyncio.run(run_stack(plan, reporter, _until_interrupted))
    return 0 if code == INTERRUPTED else code  # Ctrl-C is how `up` ends


async def _until_interrupted(stack: Stack) -> int:
    Console(highlight=False).print(endpoints(stack), soft_wrap=True)
    await asyncio.Event().wait()
    return 0


def endpoints(stack: Stack) -> Table:
    """Where everything listens."""
    plan = stack.plan
    grid = Table.grid(padding=(0, 2))
    grid.add_row("OpenAI HTTP", f"http://{plan.http_address}/v1")
    router = {**stack.ready_fields(plan.router_process), "address": plan.router_address}
    grid.add_row("router gRPC", endpoint(router))
    for process in stack.supervisor.processes:
        if "role" in process.ready_fields:
            grid.add_row(process.spec.name, endpoint(process.ready_fields))
    grid.add_row("registry", plan.registry_url)
    grid.add_row("logs", str(stack.log_dir))
    grid.add_row("stop", "Ctrl-C")
    return grid
