"""A child process that computes on request: one JSON object a line in, one out. For what needs torch in its process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.engine.servers import NotRun
from pdserve.paths import ROOT
from pdserve.process import SHIM

LINE_BYTES = 1 << 20


class Worker:
    """`python -m MODULE FLAG ...`, started by the first call, ended by `stop`."""

    def __init__(self, command: tuple[str, ...], log: Path, env: Mapping[str, str]) -> None:
        self._command = command
        self._log = log
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def call(self, request: Mapping[str, Any]) -> dict[str, float]:
        """Raises NotRun when it ended instead of answering."""
        if self._process is None:
            await self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await self._process.stdout.readline()
        if not answer:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise NotRun(f"{' '.join(self._command[1:3])} ended: {lines[-1] if lines else 'no output'}")
        result: dict[str, float] = json.loads(answer)
        return result

    async def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*SHIM, str(os.getpid()), *self._command),
                cwd=ROOT,
                env=os.environ | dict(self._env),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES,
            )

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process else []

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.kill()
        await self._process.wait()


def answer_lines(handle: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """The child's side: until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), flush=True)
