"""One child process, from its start to its READY line to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pdserve.paths import ROOT

SHIM = (sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")))
TAIL_LINES = 12
WARNING = "WARNING "  # begins a line of a child's standard output that its person should read
CONFIG_ERROR = 2  # exit code of every process of ours whose settings are wrong; its last line says which
INTERRUPTED = 130  # the shell's code for "ended by Ctrl-C"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run. Processes of one stage start, or stop, together; stages go in ascending order."""

    name: str
    command: tuple[str, ...]
    start_stage: int
    stop_stage: int
    ready_marker: str  # a line of its standard output that holds this says that it is ready
    stop_grace_s: float  # between SIGTERM and SIGKILL
    env: Mapping[str, str] = field(default_factory=dict)


class ProcessFailed(Exception):
    """A child ended, or did not become ready. `exit_code` is None when it was still running."""

    def __init__(self, name: str, exit_code: int | None, reason: str, tail: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.exit_code = exit_code
        self.reason = reason
        self.tail = tail


class StartFailed(Exception):
    """The stack did not start. The text is for the person, `exit_code` for the shell."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class Process:
    """Owns one child at a time; `start()` again after it ended runs the same command anew."""

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.ready_fields: dict[str, str] = {}
        self.warnings: list[str] = []  # what the present child said in WARNING lines until it was ready
        self._process: asyncio.subprocess.Process | None = None
        self._copier: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, timeout_s: float) -> None:
        """Spawns the child and waits for its READY line. Raises ProcessFailed; then it is not running."""
        self._ready = asyncio.get_running_loop().create_future()
        self.warnings = []
        with self.log_path.open("ab", buffering=0) as log:
            self._process = await asyncio.create_subprocess_exec(
                *SHIM,
                str(os.getpid()),
                *self.spec.command,
                cwd=ROOT,
                env={**os.environ, **self.spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,  # straight to the file: a stopped launcher must not block its children
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops all in order
            )
        self._copier = asyncio.create_task(self._copy_stdout(self._process, self._ready))
        await self._wait_ready(timeout_s)

    async def _wait_ready(self, timeout_s: float) -> None:
        assert self._process is not None
        assert self._ready is not None
        ended = asyncio.create_task(self._process.wait())
        first: list[asyncio.Future[Any]] = [ended, self._ready]
        try:
            await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._ready.done():
            self.ready_fields = parse_fields(self._ready.result())
        elif self._process.returncode is None:
            await self.stop(grace_s=0)
            raise ProcessFailed(self.spec.name, None, f"was not ready within {timeout_s:.0f} s", self.tail())
        else:
            raise ProcessFailed(self.spec.name, self._process.returncode, await self.wait(), self.tail())

    async def _copy_stdout(self, process: asyncio.subprocess.Process, ready: asyncio.Future[str]) -> None:
        assert process.stdout is not None
        pending = b""
        with self.log_path.open("ab", buffering=0) as log:
            while chunk := await process.stdout.read(65536):
                log.write(chunk)
                if not ready.done():
                    pending = self._heed(pending + chunk, ready)

    def _heed(self, text: bytes, ready: asyncio.Future[str]) -> bytes:
        """Takes the complete lines up to the one that holds the marker; returns the incomplete rest."""
        *lines, rest = text.split(b"\n")
        for line in (line.decode(errors="replace") for line in lines):
            if line.startswith(WARNING):
                self.warnings.append(line.removeprefix(WARNING))
            elif self.spec.ready_marker in line:
                ready.set_result(line)
                break
        return rest

    async def wait(self) -> str:
        """Waits until the child has ended; returns how, as in "exited with code 1" or "was killed by SIGKILL"."""
        assert self._process is not None
        assert self._copier is not None
        code = await self._process.wait()
        await self._copier
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    async def stop(self, grace_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL after the grace period. Returns when the child is gone."""
        if self._process is None:
            return
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), self.spec.stop_grace_s if grace_s is None else grace_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
        await self._process.wait()
        if self._copier is not None:
            await self._copier

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                self._process.send_signal(number)

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines of the log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            return _last_lines(log, num_lines)


def parse_fields(ready_line: str) -> dict[str, str]:
    """`READY role=decode address=127.0.0.1:5000` -> {"role": "decode", "address": "127.0.0.1:5000"}."""
    return dict(word.split("=", 1) for word in ready_line.split() if "=" in word)


def endpoint(ready_fields: Mapping[str, str]) -> str:
    """As `127.0.0.1:5000  metrics http://127.0.0.1:5001/metrics`; what the child did not say is left out."""
    metrics = f"metrics http://{ready_fields['metrics']}/metrics" if "metrics" in ready_fields else ""
    return f"{ready_fields.get('address', '')}  {metrics}".strip()


def _last_lines(log: BinaryIO, num_lines: int) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 16384))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])
