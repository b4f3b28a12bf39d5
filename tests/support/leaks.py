"""What a test must not leave behind: child processes and asyncio tasks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

SETTLE_S = 2.0  # grpc finishes its last tasks, and a killed child is reaped, a little after a test's last line


def children() -> set[psutil.Process]:
    """Children that run, without Python's own resource tracker, which lives until this process ends."""
    return {p for p in psutil.Process().children(recursive=True) if not _is_exempt(p)}


def leaked_children(before: set[psutil.Process], settle_s: float = SETTLE_S) -> set[psutil.Process]:
    deadline = time.monotonic() + settle_s
    while (leaked := children() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return leaked


async def leaked_tasks(before: set[asyncio.Task[Any]], settle_s: float = SETTLE_S) -> set[asyncio.Task[Any]]:
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    return (await asyncio.wait(leaked, timeout=settle_s))[1] if leaked else set()


def _is_exempt(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or any("resource_tracker" in a for a in process.cmdline())
    except psutil.NoSuchProcess:
        return True
