"""Pods as processes of their own, started as an operator does: `python -m prefill_service ...`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
READY_S = 60.0


class PodProcess:
    """Use as an async context manager: killed at the end if it still runs."""

    def __init__(self, role: str, *, module: str = "", env: Mapping[str, str] | None = None, **flags: object) -> None:
        """`flags` are PodSettings fields; `module` takes the place of the role's own; `env` is added to ours."""
        self._env = os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items())
        self._command = (sys.executable, "-m", module or f"{role}_service", *(part for pair in pairs for part in pair))
        self._process: asyncio.subprocess.Process | None = None
        self.ready_line = ""
        self.stdout = self.stderr = ""
        self.warnings: list[str] = []

    async def __aenter__(self) -> PodProcess:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=ROOT,
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.communicate()

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "enter it first"
        return self._process

    @property
    def fields(self) -> dict[str, str]:
        """Of the READY line: role, pod_id, address, metrics."""
        return dict(part.split("=", 1) for part in self.ready_line.split()[1:])

    async def until_ready(self) -> dict[str, str]:
        """Raises EOFError with the last words of a process that ended instead."""
        assert self.process.stdout is not None, "piped"
        async with asyncio.timeout(READY_S):
            while (line := (await self.process.stdout.readline()).decode()).startswith("WARNING "):
                self.warnings.append(line)
        self.ready_line = line
        if not self.ready_line.startswith("READY "):
            await self.ended()
            raise EOFError(self.stderr)
        return self.fields

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Waits for its end; then `stdout` and `stderr` hold the rest of what it said."""
        stdout, stderr = await asyncio.wait_for(self.process.communicate(), READY_S)
        self.stdout, self.stderr = stdout.decode(), stderr.decode()
        assert self.process.returncode is not None, "communicate() waits for the end"
        return self.process.returncode
