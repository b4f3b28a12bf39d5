"""The process around a pod: flags in, WARNING lines if any and one READY line out, an exit code at the end.

Exit codes: 0 after SIGTERM or SIGINT, 1 after a crash of the engine, 2 when it could not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvloop

from pod.cores import parse_cores, pin
from pod.errors import StartupError
from pod.plan import resolve
from pod.pod import Pod
from pod.role import PodContext, Role
from pod.settings import PodSettings
from proto.errors import InternalError
from proto.process import configure_logging, freeze_memory, stop_event
from proto.settings import ConfigError


def main(role: str, make_role: Callable[[PodContext], Role]) -> int:
    """Runs a pod until SIGTERM or SIGINT; `role` is "prefill" or "decode"."""
    try:
        settings = PodSettings.load()
        configure_logging(role, settings.log_level)
        pin(parse_cores(settings.cores))  # before torch, whose threads inherit it, and before threads are counted
        code: int = uvloop.run(_serve(settings, role, make_role))
        return code
    except (ConfigError, StartupError) as error:
        print(f"{role} pod: {error}", file=sys.stderr)
        return 2


async def _serve(settings: PodSettings, role: str, make_role: Callable[[PodContext], Role]) -> int:
    plan = await asyncio.to_thread(resolve, settings, role)
    print(f"{role} pod: {plan.describe()}", file=sys.stderr, flush=True)
    with engine_warnings() as warnings:
        pod = await Pod.start(plan, make_role)
    stop = stop_event()
    freeze_memory()
    for warning in [*plan.warnings, *warnings]:
        print(f"WARNING {warning}", flush=True)
    print(f"READY role={role} pod_id={plan.pod_id} address={pod.address} metrics={pod.metrics_address}", flush=True)
    await first(stop.wait(), pod.ended.wait())
    if pod.crash is None:
        stop.clear()  # a second signal, or a crash, ends the drain
        await first(pod.drain(plan.settings.drain_timeout_s), stop.wait(), pod.ended.wait())
    await pod.stop(InternalError(f"the engine crashed: {pod.crash}", pod_id=plan.pod_id) if pod.crash else None)
    return 1 if pod.crash else 0


@contextlib.contextmanager
def engine_warnings() -> Iterator[list[str]]:
    """What the engine warns of in its log meanwhile, such as that weights do not fit into the cache: a line each."""
    handler, logger = _Lines(logging.WARNING), logging.getLogger("engine")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split()))


async def first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Waits for the first of them to end, and cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
