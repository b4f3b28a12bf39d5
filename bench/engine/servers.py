"""Servers as the bench starts them: processes behind one port, frozen while others are measured, and stopped.

Every process leads a session of its own, and dies with the bench even by `kill -9` (pdserve/child.py). Stopping one
ends its session to the last process, whatever state it is in; nothing else is ever signalled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.engine.client import Endpoint
from pdserve.paths import ROOT
from pdserve.process import SHIM

MODEL_NAME = "bench"
STOP_GRACE_S = 20.0
POLL_S = 0.25


class NotRun(Exception):
    """Why something could not be started or measured here: one line for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process of a server; its standard error and output go to one log file. `port` is where it says it is well."""

    name: str
    command: tuple[str, ...]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None  # None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """`programs` start one after the other, the last one's port is the server's."""

    name: str
    programs: tuple[Program, ...]
    start_timeout_s: float
    kv_pool_bytes: Callable[[Path], int]  # from the log directory: resident memory that is KV cache
    freezable: bool = True


class Server:
    """A started ServerSpec. Use `start`, and `stop` whatever happens."""

    def __init__(self, spec: ServerSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log_dir = log_dir / spec.name
        self.endpoint = Endpoint(spec.programs[-1].port, MODEL_NAME)
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Returns when all are well. Raises NotRun with the last line of the log; then nothing runs."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.spec.start_timeout_s
        try:
            for program in self.spec.programs:
                process = await self._spawn(program)
                await self._until_well(program, process, deadline)
        except BaseException:
            await self.stop()
            raise

    async def _spawn(self, program: Program) -> asyncio.subprocess.Process:
        command = (*_on_cores(program.cores), *program.command)
        with self._log(program).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*SHIM, str(os.getpid()), _executable(command[0]), *command[1:]),
                cwd=ROOT,
                env=os.environ | dict(program.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    async def _until_well(self, program: Program, process: asyncio.subprocess.Process, deadline: float) -> None:
        while not await _is_well(program.port):
            if process.returncode is not None:
                raise NotRun(f"{program.name} ended with code {process.returncode}: {self._last_words(program)}")
            if time.monotonic() > deadline:
                raise NotRun(f"{program.name} was not ready in {self.spec.start_timeout_s:.0f} s; {self._log(program)}")
            await asyncio.sleep(POLL_S)

    def _log(self, program: Program) -> Path:
        return self.log_dir / f"{program.name}.log"

    def _last_words(self, program: Program) -> str:
        lines = [line.strip() for line in self._log(program).read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return ((errors or [line for line in lines if line] or ["no output"])[-1])[-300:]

    @property
    def processes(self) -> list[psutil.Process]:
        """All that live of it."""
        return [p for leader in self._processes for p in family(leader.pid)]

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.spec.freezable:
            for process in self.processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    async def stop(self) -> None:
        """SIGTERM in reverse order, then SIGKILL to whatever is left of each session."""
        self.thaw()
        for process in reversed(self._processes):
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_GRACE_S)
            await _kill(family(process.pid))
            await process.wait()
        self._processes = []


def _on_cores(cores: frozenset[int] | None) -> tuple[str, ...]:
    return ("taskset", "-c", ",".join(map(str, sorted(cores)))) if cores else ()


def _executable(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise NotRun(f"{name}: no such program")
    return found


async def _is_well(port: int) -> bool:
    """Whether GET /health answers with status 200."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return b" 200 " in await asyncio.wait_for(reader.readline(), 5)
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


def family(leader: int) -> list[psutil.Process]:
    """The processes that descend from `leader` or are of the session that it began, itself included."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.NoSuchProcess):
        found = {p.pid: p for p in psutil.Process(leader).children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                found[process.pid] = process
    return [process for process in found.values() if _lives(process)]


async def _kill(processes: Sequence[psutil.Process]) -> None:
    """Returns when all are dead; a zombie is."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    while any(_lives(process) for process in processes):  # noqa: ASYNC110 - the end of no child of ours is an event
        await asyncio.sleep(POLL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def python(module: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *flags)


def flags(options: Mapping[str, object]) -> Sequence[str]:
    """`{"a": 1}` -> --a 1; an option that is None is left out."""
    return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
