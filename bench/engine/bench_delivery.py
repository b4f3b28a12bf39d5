"""What it costs to bring an engine step's tokens to their clients: processor time of each process on the way.

    python -m bench.engine.bench_delivery [--steps 150] [--rounds 5] [--json FILE]

A colocated stack on the fake engine, whose step sleeps for 20 ms, so that what the processes take between two steps is
the delivery: the pod's loop, router and gateway, and the client, which is this program; beside them the registry and
what the fake engine computes on its thread. By /proc/PID/task/*/schedstat, a step, in milliseconds. Two such stacks
take turns: router and gateway in one process (`together`, the default of `up`) and in two (`apart`).

In the same round a bare connection of frames carries a message every 20 ms: the floor of the hop from a pod to the
router, both its ends with the timer that paces it. Apart there is another hop, over gRPC, to the gateway; the last is
HTTP, where each stream's token is a write.

- pod_hops_1, pod_hops_16: the pod's loop at 1 and 16 streams, in floors of a hop, of which it is one end.
- delivery_hops_1, delivery_hops_16: pod's loop, router and gateway together, likewise.
- delivery_ms_1, delivery_ms_16: the same with the client, in milliseconds.
- together_by_apart_1, together_by_apart_16: these by what they are apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import uvloop

from bench.arguments import exit_code, new_file, positive
from bench.bars import report
from bench.engine.client import RequestFailed
from bench.engine.goals import Goal, Round, evaluate, ratio
from bench.engine.metrics import Timeline
from bench.engine.servers import MODEL_NAME, NotRun, Program, Server, ServerSpec, flags, free_port, python
from bench.engine.workload import Request
from pdserve.paths import ROOT
from pdserve.stack import BASE_ENV

STREAMS = (1, 16)
STEP_S = 0.02
WARM_UP = 10  # tokens of each stream
PATIENCE = 10  # times the time that a measurement should take
TOGETHER, APART = "together", "apart"
POD, ENGINE, CLIENT = "pod", "engine", "client"
# process -> how its command line tells it; the first that fits
PROCESSES = {
    POD: "decode_service",
    "front": "gateway.front",
    "router": "router",
    "gateway": "gateway",
    "registry": "valkey",
}
OURS = (POD, "front", "router", "gateway")


def _goals(streams: int, *, pod_hops: float, hops: float, by_apart: float) -> tuple[Goal, ...]:
    """How many floors of a hop the pod's loop and the whole way may take; what part of it is left together."""
    together, apart = f"{streams} {TOGETHER}", f"{streams} {APART}"
    hop = ("echo", "hop")
    return (
        Goal(name=f"pod_hops_{streams}", needs=((together, POD), hop), value=ratio, op="<=", threshold=pod_hops),
        Goal(name=f"delivery_hops_{streams}", needs=((together, "ours"), hop), value=ratio, op="<=", threshold=hops),
        Goal(name=f"delivery_ms_{streams}", needs=((together, "all"),), value=float, op="<="),
        Goal(
            name=f"together_by_apart_{streams}",
            needs=((together, "all"), (apart, "all")),
            value=ratio,
            op="<=",
            threshold=by_apart,
        ),
    )


def stack(front: str, run_dir: Path) -> ServerSpec:
    port = free_port()
    options: dict[str, object] = {
        "engine": "fake",
        "served-model-name": MODEL_NAME,
        "port": port,
        "router-port": 0,
        "kv-memory": 16 << 20,
        "run-dir": run_dir / front,
        "front": front,
        "log-level": "warning",
    }
    command = python("pdserve", "up", *flags(options), "--colocated")
    up = Program(name=front, command=command, port=port, env={"PDSERVE_FAKE_STEP_S": str(STEP_S)})
    return ServerSpec(
        name=front, programs=(up,), start_timeout_s=60.0, kv_pool_bytes=lambda _: 16 << 20, freezable=False
    )


def name_of(command: Sequence[str]) -> str | None:
    """Which of PROCESSES a command line starts."""
    program = command[command.index("-m") + 1] if "-m" in command else " ".join(command[:1])
    return next((name for name, word in PROCESSES.items() if word in program), None)


def thread_ms(pid: int) -> dict[int, float]:
    """Processor time of each thread that lives, by its id; the main one has the process'. Counted in nanoseconds."""
    times = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            times[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e6
    return times


def read_processes(pids: Mapping[str, int]) -> dict[str, dict[int, float]]:
    return {name: thread_ms(pid) for name, pid in pids.items()}


def costs(
    pids: Mapping[str, int], before: Mapping[str, Mapping[int, float]], after: Mapping[str, Mapping[int, float]]
) -> dict[str, float]:
    """Milliseconds of each process; of the pod without its engine: the thread that took most beside the main one."""
    spent = {name: {thread: ms - before[name].get(thread, 0.0) for thread, ms in after[name].items()} for name in pids}
    cost = {name: sum(threads.values()) for name, threads in spent.items()}
    cost[ENGINE] = max(ms for thread, ms in spent[POD].items() if thread != pids[POD])
    cost[POD] -= cost[ENGINE]
    return cost


async def measure(server: Server, pids: Mapping[str, int], streams: int, steps: int) -> dict[str, float]:
    """Processor milliseconds a step, by process, of "ours", and with the client "all". Raises RequestFailed."""
    timelines = [Timeline(time.perf_counter()) for _ in range(streams)]
    requests = [Request(prompt=(i + 1, 2, 3), max_tokens=steps + 20 * WARM_UP) for i in range(streams)]
    clients = [
        asyncio.create_task(server.endpoint.run(request, timeline))
        for request, timeline in zip(requests, timelines, strict=True)
    ]
    try:
        async with asyncio.timeout(PATIENCE * STEP_S * (steps + WARM_UP)):
            await _until(clients, timelines, WARM_UP)
            first, before = len(timelines[0].token_times), read_processes(pids)
            await _until(clients, timelines, first + steps)
            after, last = read_processes(pids), len(timelines[0].token_times)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    cost = {name: ms / (last - first) for name, ms in costs(pids, before, after).items()}
    ours = sum(cost[name] for name in OURS if name in cost)
    return {**cost, "ours": ours, "all": ours + cost[CLIENT]}


async def _until(clients: Sequence[asyncio.Task[Timeline]], timelines: Sequence[Timeline], num_tokens: int) -> None:
    while any(len(timeline.token_times) < num_tokens for timeline in timelines):
        if ended := next((client for client in clients if client.done()), None):
            await ended
            raise RequestFailed("a stream ended before the measurement did")
        await asyncio.sleep(STEP_S)


async def echo(messages: int) -> float:
    """Milliseconds of processor time that a message costs both ends of a bare stream."""
    serve = await _echo("--messages", str(messages), "--every-ms", str(round(STEP_S * 1e3)))
    assert serve.stdout is not None, "piped"
    port = (await serve.stdout.readline()).decode().strip()
    read = await _echo("--read", port)
    outputs = await asyncio.gather(serve.communicate(), read.communicate())
    return sum(float(stdout.split()[-1]) for stdout, _ in outputs)


async def _echo(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.engine.echo",
        *arguments,
        cwd=ROOT,
        env=os.environ | BASE_ENV,
        stdout=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def running(front: str, log_dir: Path) -> AsyncIterator[tuple[Server, dict[str, int]]]:
    """A stack, and its processes' ids with this one's."""
    server = Server(stack(front, log_dir), log_dir)
    await server.start()
    try:
        pids = {name: p.pid for p in server.processes if (name := name_of(p.cmdline())) is not None}
        yield server, {**pids, CLIENT: psutil.Process().pid}
    finally:
        await server.stop()


async def run(steps: int, num_rounds: int, log_dir: Path) -> list[Round]:
    async with running(TOGETHER, log_dir) as together, running(APART, log_dir) as apart:
        stacks = {TOGETHER: together, APART: apart}
        return [await _round(stacks, steps) for _ in range(num_rounds)]


async def _round(stacks: Mapping[str, tuple[Server, Mapping[str, int]]], steps: int) -> Round:
    measured = {("echo", "hop"): await echo(steps)}
    for streams in STREAMS:
        for front, (server, pids) in stacks.items():
            cost = await measure(server, pids, streams, steps)
            measured |= {(f"{streams} {front}", name): ms for name, ms in cost.items()}
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=150, help="engine steps of each measurement")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=new_file, help="also write the results there")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as log_dir:
            rounds: list[Round] = uvloop.run(run(arguments.steps, arguments.rounds, Path(log_dir)))
    except (NotRun, RequestFailed, TimeoutError) as error:
        print(f"error: {error or 'a measurement took too long'}", file=sys.stderr)
        return 1
    for key in rounds[0]:
        values = [each[key] for each in rounds]
        print(f"{' '.join(key)}: {statistics.median(values):.2f} ms a step (least {min(values):.2f})")
    table = [{" ".join(key): value for key, value in each.items()} for each in rounds]
    one = _goals(1, pod_hops=1.0, hops=2.75, by_apart=0.8)
    many = _goals(16, pod_hops=1.25, hops=6.0, by_apart=0.9)
    report(evaluate([*one, *many], rounds, {}), arguments.json, rounds=table)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
