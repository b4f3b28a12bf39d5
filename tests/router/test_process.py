"""The router as a process: what it imports, prints, refuses; and pods as processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from decode_service import stream
from proto import common_pb2, inference_pb2
from proto.errors import PodUnavailable
from proto.service import ROUTER_PATIENCE_S
from proto.settings import ConfigError
from router.client import RouterClient
from router.gateway_client import GatewayClient
from router.model import ModelError, load_model
from router.server import Router
from router.settings import RouterSettings
from router.snapshot import DECODE
from tests.router.support import Outcome, Stack, long_running, running_router, until
from tests.router.test_end_to_end import assert_right
from tests.support.cluster import Cluster, tokens_of

ROOT = Path(__file__).parents[2]
START_S = 30.0


def test_importing_the_router_imports_no_torch() -> None:
    modules = sorted(f"router.{file.stem}" for file in (ROOT / "router").glob("*.py") if not file.stem.startswith("__"))
    code = (
        f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'transformers', 'engine') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "fake", "--port", "70000"], "setting 'port' = '70000'"),
        ([], "setting 'model'"),
        (["--model", "fake", "--cluster", "a:*"], "setting 'cluster'"),
        (["--model", "/nonexistent"], "cannot read /nonexistent/config.json"),
    ],
)
def test_a_bad_setting_is_one_line(flags: list[str], message: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "router", *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_settings_come_from_flags() -> None:
    settings = RouterSettings.load(["--model", "fake", "--queue-wait-s", "2"])
    assert (settings.port, settings.queue_wait_s) == (50051, 2.0)
    with pytest.raises(ConfigError, match="queue_wait_s"):
        RouterSettings.load(["--model", "fake", "--queue-wait-s", "-1"])


def test_model_directories(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}')
    model = load_model(str(tmp_path), "")
    assert (model.name, model.model_id, model.eos_token_ids) == (tmp_path.name, tmp_path.name, frozenset({2}))
    (tmp_path / "source.json").write_text('{"model_id": "smol"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.6, "top_k": null}')
    model = load_model(str(tmp_path), "nice")
    assert (model.name, model.model_id, model.eos_token_ids) == ("nice", "smol", frozenset({2, 3}))
    assert model.sampling_defaults == {"temperature": 0.6}
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    with pytest.raises(ModelError, match="max_position_embeddings"):
        load_model(str(tmp_path), "")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", "hot", "a number"),
        ("top_p", True, "a number"),
        ("eos_token_id", "x", "a token id, a list of them or null"),
        ("eos_token_id", [2, None], "a token id, a list of them or null"),
    ],
)
def test_a_recommendation_that_means_nothing_is_named(tmp_path: Path, field: str, value: object, allowed: str) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 64}')
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    named = re.escape(f"generation_config.json: {field} = {value!r}: must be {allowed}")
    with pytest.raises(ModelError, match=named):
        load_model(str(tmp_path), "")


class Process:
    """A child with a READY line."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, str]) -> None:
        self.process = process
        self.ready = ready

    @classmethod
    async def start(cls, module: str, **flags: object) -> Process:
        arguments = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode().split()
        assert line[:1] == ["READY"], line
        return cls(process, dict(part.split("=", 1) for part in line[1:] if "=" in part))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def end(self) -> None:
        """However it is now: nothing is left of it."""
        with contextlib.suppress(ProcessLookupError):  # reaped by a thread that has not told us yet
            if self.process.returncode is None:
                self.send(signal.SIGCONT)
                self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def pod_processes(
    registry_url: str, runtime_dir: Path, **pod_flags: object
) -> AsyncIterator[tuple[Stack, list[Process]]]:
    """A prefill pod and two decode pods as processes, a router in this one. Pods are slow: 5 ms a step."""
    pods = Cluster(registry_url, runtime_dir)
    flags: dict[str, object] = {
        "model": "fake",
        "cluster": pods.name,
        "registry_url": registry_url,
        "runtime_dir": runtime_dir,
        "num_blocks": 64,
        "heartbeat_interval_s": 0.2,
        "fake_step_s": 0.005,
    } | pod_flags
    started: list[Process] = []
    try:
        modules = ["prefill_service", "decode_service", "decode_service"]
        started += await asyncio.gather(*(Process.start(module, **flags) for module in modules))
        async with running_router(pods) as stack:
            await stack.until_pods(3)
            yield stack, started
    finally:
        await asyncio.gather(*(process.end() for process in started))


def decoding(stack: Stack, processes: list[Process]) -> Process:
    ((request, _),) = stack.router.requests.live()
    name = request.ledger().attempts[-1].decode_pod
    return next(process for process in processes if process.ready["pod_id"] == name)


async def generate_with_fault(stack: Stack, processes: list[Process], fault: signal.Signals) -> tuple[Outcome, Process]:
    """Sends `fault` to the decode pod after ten tokens, and checks the answer."""
    request, outcome, victim = long_running(40, 60), Outcome(), None
    async for response in stack.client.generate(request):
        outcome.responses.append(response)
        if victim is None and len(outcome.token_ids) >= 10:
            victim = decoding(stack, processes)
            victim.send(fault)
    assert victim is not None
    assert_right(outcome, request)
    assert [bool(a.failure) for a in outcome.ledger.attempts] == [True, False]
    return outcome, victim


async def test_a_killed_decode_process_is_not_noticed_by_the_client(registry_url: str, runtime_dir: Path) -> None:
    async with pod_processes(registry_url, runtime_dir) as (stack, processes):
        _, victim = await generate_with_fault(stack, processes, signal.SIGKILL)
        await victim.process.wait()
        again = long_running(30, 5)
        assert_right(await stack.generate(again), again)


async def test_a_stopped_decode_process_comes_back_clean(registry_url: str, runtime_dir: Path) -> None:
    """It is given up after 2 s of silence. What it still sends when it runs on reaches nobody, and it is used again."""
    async with pod_processes(registry_url, runtime_dir) as (stack, processes):
        _, victim = await generate_with_fault(stack, processes, signal.SIGSTOP)
        others = [process for process in processes[1:] if process is not victim]
        victim.send(signal.SIGCONT)
        for other in others:
            other.send(signal.SIGKILL)
        await until(stack.sees(lambda pods: victim.ready["pod_id"] in {pod.pod_id for pod in pods}))
        request = long_running(40, 60)
        outcome = await stack.generate(request)
        assert_right(outcome, request)
        assert {a.decode_pod for a in outcome.ledger.attempts if not a.failure} == {victim.ready["pod_id"]}
        await until(stack.sees(lambda pods: [p.num_free_blocks for p in pods if p.role == DECODE] == [64]))


async def test_a_stopped_prefill_process_is_given_up(registry_url: str, runtime_dir: Path) -> None:
    """Nothing breaks when a process hangs; its heartbeat is what stops."""
    async with pod_processes(registry_url, runtime_dir, fake_prefill_s_per_token=0.01) as (stack, processes):
        request = long_running(40, 10)
        task = asyncio.create_task(stack.generate(request))
        await until(lambda: stack.router.requests.states() == ["prefilling"])
        processes[0].send(signal.SIGSTOP)
        outcome = await task
        assert_right(outcome, request)
        assert [bool(a.prefill_pod) for a in outcome.ledger.attempts] == [True, False]
        processes[0].send(signal.SIGCONT)
        await stack.until_pods(3)
        again = await stack.generate(request)
        assert_right(again, request)
        assert [a.prefill_pod for a in again.ledger.attempts] == [processes[0].ready["pod_id"]]


@pytest.mark.parametrize("kind", [RouterClient, GatewayClient])
async def test_a_killed_router_leaves_nothing_on_the_pods(cluster: Cluster, kind: type[RouterClient]) -> None:
    for role in ("prefill", "decode"):
        await cluster.start(role, fake_step_s=0.003)
    router = await Process.start(
        "router", model="fake", port=0, registry_url=cluster.registry_url, cluster=cluster.name
    )
    try:
        async with kind(router.ready["address"]) as client:
            outcome = Outcome()
            with pytest.raises(PodUnavailable):
                await read_and_kill(client, outcome, router)
        assert outcome.last.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
        await cluster.assert_idle()
    finally:
        await router.end()


async def test_a_frozen_router_is_cut_off_and_comes_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay, and nobody reads them; the pod frees all of it, after 1.6 s here.

    No answer is lost, neither those that ran nor those that waited for a place.
    """
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.1)
    pod = await cluster.start("decode", fake_step_s=0.003, max_num_seqs=2)
    flags = {"registry_url": cluster.registry_url, "cluster": cluster.name, "queue_wait_s": 30}
    router = await Process.start("router", model="fake", port=0, **flags)
    try:
        async with RouterClient(router.ready["address"]) as client:
            requests = [long_running(50, 600, seed) for seed in range(4)]
            outcomes = [Outcome() for _ in requests]
            answers = [asyncio.create_task(read(client, *pair)) for pair in zip(requests, outcomes, strict=True)]
            await until(lambda: sum(len(outcome.token_ids) >= 5 for outcome in outcomes) == 2)
            router.send(signal.SIGSTOP)
            await until(lambda: not tokens_of(pod).connections)
            await cluster.assert_idle()
            router.send(signal.SIGCONT)
            await asyncio.gather(*answers)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert_right(outcome, request)
    finally:
        await router.end()


def test_clients_wait_for_a_router_for_longer_than_its_pods_do() -> None:
    """It goes on with all that it has when it comes back, if they are still there."""
    assert stream.MAX_SILENT_BEATS * stream.HEARTBEAT_S < ROUTER_PATIENCE_S


async def test_a_router_waits_for_its_gateways_for_as_long_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not what ends the answers of a gateway that stood still."""
    options: dict[str, object] = {}
    make = grpc.aio.server

    def record(**given: Any) -> grpc.aio.Server:
        options.update(given["options"])
        return make(**given)

    monkeypatch.setattr(grpc.aio, "server", record)
    Router(RouterSettings.model_validate({"model": "fake"}))
    patience_ms = 1000 * ROUTER_PATIENCE_S
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == patience_ms


async def read(client: RouterClient, request: inference_pb2.GenerateRequest, outcome: Outcome) -> None:
    async for response in client.generate(request):
        outcome.responses.append(response)


async def read_and_kill(client: RouterClient, outcome: Outcome, router: Process) -> None:
    async for response in client.generate(long_running(50, 900)):
        outcome.responses.append(response)
        if len(outcome.token_ids) == 5:
            router.send(signal.SIGKILL)


async def test_a_router_process_from_ready_to_sigterm(registry_url: str, tmp_path: Path) -> None:
    router = await Process.start("router", model="fake", port=0, registry_url=registry_url, cluster="nobody")
    try:
        async with RouterClient(router.ready["address"]) as client:
            assert [model.id for model in await client.list_models()] == ["fake"]
            assert await client.why_not_serving() == "no usable decode pod (none registered)"
        host, port = router.ready["metrics"].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        assert "pdserve_router_ttft_seconds_bucket" in page
        router.send(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 10) == 0
    finally:
        await router.end()
