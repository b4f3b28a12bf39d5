"""Starts a stack, runs something beside it, and stops it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve import signals
from pdserve.console import Reporter
from pdserve.process import CONFIG_ERROR, INTERRUPTED, Process, ProcessFailed, StartFailed
from pdserve.stack import Plan, process_specs
from pdserve.supervisor import Supervisor
from proto.errors import PdserveError
from proto.service import channel


class Stack:
    """The running processes of a plan, as the `body` of `run_stack` sees them."""

    def __init__(self, plan: Plan, reporter: Reporter) -> None:
        self.plan = plan
        self.log_dir = plan.run_dir / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        (plan.run_dir / "kv").mkdir(exist_ok=True)
        processes = [Process(spec, self.log_dir / f"{spec.name}.log") for spec in process_specs(plan)]
        self.supervisor = Supervisor(processes, reporter, start_timeout_s=plan.settings.start_timeout_s)

    async def start(self) -> None:
        """Returns when every process is ready and the router serves. Raises StartFailed."""
        try:
            await self.supervisor.start()
            await asyncio.wait_for(serving(self.plan.router_address), self.plan.settings.start_timeout_s)
        except ProcessFailed as error:
            raise explain_failure(error, self.log_dir) from None
        except TimeoutError:
            raise StartFailed(f"the router found no pods; logs are in {self.log_dir}", 1) from None


async def run_stack(plan: Plan, reporter: Reporter, body: Callable[[Stack], Awaitable[int]]) -> int:
    """Starts the stack, awaits `body`, stops the stack; returns body's code, or INTERRUPTED. Raises StartFailed."""
    stack = Stack(plan, reporter)
    main = asyncio.create_task(_start_and_serve(stack, reporter, body))
    with signals.handled(first=main.cancel, again=stack.supervisor.kill):
        try:
            return await main
        except asyncio.CancelledError:
            reporter.say("stopping ...")
            return INTERRUPTED
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


async def serving(address: str) -> None:
    """Waits until the gRPC server at `address` says SERVING."""
    async with channel(address) as to_server:
        watch = health_pb2_grpc.HealthStub(to_server).Watch
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # not up yet
                async for update in watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if update.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def run_directory(wanted: Path | None) -> Iterator[Path]:
    """The given directory, or a new private one, left behind only when a stack failed: for its logs."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    created = Path(tempfile.mkdtemp(prefix="pdserve-"))
    keep = False
    try:
        yield created
    except (StartFailed, PdserveError):
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(created, ignore_errors=True)
