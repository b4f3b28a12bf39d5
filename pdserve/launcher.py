"""Starts a stack, runs something beside it, and stops it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from pdserve import signals
from pdserve.checks import LaunchError
from pdserve.console import Reporter
from pdserve.process import CONFIG_ERROR, INTERRUPTED, Process, ProcessFailed, StartFailed
from pdserve.readiness import router_sees
from pdserve.stack import Plan, process_specs
from pdserve.supervisor import Supervisor
from proto.errors import PdserveError

LOCK = "lock"  # the file in a run directory that a stack holds locked

# sockaddr_un holds 107 bytes; the registry's socket lies in the run directory.
RUN_DIR_MAX_BYTES = 90


class Stack:
    """The running processes of a plan, as the `body` of `run_stack` sees them."""

    def __init__(self, plan: Plan, reporter: Reporter) -> None:
        self.plan = plan
        self.log_dir = plan.run_dir / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        (plan.run_dir / "kv").mkdir(exist_ok=True)
        processes = [Process(spec, self.log_dir / f"{spec.name}.log") for spec in process_specs(plan)]
        self._say = reporter.say
        self.supervisor = Supervisor(processes, reporter, start_timeout_s=plan.settings.start_timeout_s)

    async def start(self) -> None:
        """Returns when every process is ready and the router sees every pod. Raises StartFailed."""
        settings = self.plan.settings
        try:
            await self.supervisor.start()
            seen = router_sees(
                self.ready_fields(self.plan.router_process)["metrics"], settings.num_prefill, settings.decode
            )
            await asyncio.wait_for(seen, settings.start_timeout_s)
        except ProcessFailed as error:
            raise explain_failure(error, self.log_dir) from None
        except TimeoutError:
            raise StartFailed(f"the router does not see every pod; logs are in {self.log_dir}", 1) from None

        for process in self.supervisor.processes:
            for warning in process.warnings:
                self._say(f"warning: {process.spec.name}: {warning}")

    def ready_fields(self, name: str) -> Mapping[str, str]:
        """What the process said in its READY line."""
        return next(p.ready_fields for p in self.supervisor.processes if p.spec.name == name)


async def run_stack(plan: Plan, reporter: Reporter, body: Callable[[Stack], Awaitable[int]]) -> int:
    """Starts the stack, awaits `body`, stops the stack; returns body's code, or INTERRUPTED. Raises StartFailed."""
    stack = Stack(plan, reporter)
    main = asyncio.create_task(_start_and_serve(stack, reporter, body))
    with signals.handled(first=main.cancel, again=stack.supervisor.kill):
        try:
            return await main
        except asyncio.CancelledError:
            reporter.say("\nstopping ...")
            return INTERRUPTED
        except PdserveError:
            reporter.say(f"\nlogs are in {stack.log_dir}")
            raise
        finally:
            await stack.supervisor.stop()


async def _start_and_serve(stack: Stack, reporter: Reporter, body: Callable[[Stack], Awaitable[int]]) -> int:
    with reporter.starting():
        await stack.start()
    keeper = asyncio.create_task(stack.supervisor.run())
    try:
        return await body(stack)
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper


def explain_failure(error: ProcessFailed, log_dir: Path) -> StartFailed:
    """A child that ended with code 2 has said in its last line which setting is wrong; else show the log's end."""
    if error.exit_code == CONFIG_ERROR and error.tail:
        line = error.tail.splitlines()[-1]
        return StartFailed(f"{error.name}: {line.split(': ', 1)[-1]}", CONFIG_ERROR)
    lines = "\n".join(f"    {line}" for line in error.tail.splitlines())
    return StartFailed(f"{error.name} {error.reason}; its log is {log_dir / error.name}.log and ends with\n{lines}", 1)


@contextlib.contextmanager
def run_directory(wanted: Path | None) -> Iterator[Path]:
    """The given directory, or a new private one, left behind only when a stack failed: for its logs.

    It is this stack's alone until the end of the context. Raises LaunchError for one that cannot be.
    """
    if wanted is not None:
        with locked(wanted):
            yield wanted.resolve()
        return
    created = Path(tempfile.mkdtemp(prefix="pdserve-"))
    keep = False
    try:
        with locked(created):
            yield created
    except StartFailed as error:
        keep = error.exit_code != CONFIG_ERROR  # whose one line says everything
        raise
    except PdserveError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(created, ignore_errors=True)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Makes the directory where there is none and keeps other stacks out of it. Raises LaunchError.

    The lock is the open file's, which no child inherits: the kernel frees it even when the launcher is killed. The file
    stays, for to remove it would let two stacks lock two files of this name.
    """
    if len(os.fsencode(run_dir.resolve())) > RUN_DIR_MAX_BYTES:
        raise LaunchError(f"--run-dir {run_dir}: at most {RUN_DIR_MAX_BYTES} bytes fit into the names of UNIX sockets")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / LOCK).open("ab")
    except OSError as error:
        raise LaunchError(f"--run-dir {run_dir}: {error.strerror}: pass a directory that can be written to") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"--run-dir {run_dir}: another stack runs in it: stop that, or pass another") from None
        yield
