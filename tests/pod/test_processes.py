"""Pods as real processes: READY line, health, drain, kill -9, a lost registry, and start-up errors."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from proto.errors import PeerLost, PodUnavailable
from proto.registry import pod_key
from proto.registry_pb2 import POD_STATE_DRAINING, POD_STATE_READY, PodRecord
from tests.support.http import scrape
from tests.support.pod_client import PodClient, continued, generate, right_answer, spec
from tests.support.polling import until
from tests.support.ports import free_port
from tests.support.processes import PodProcess
from tests.support.registry import RegistryServer

WAIT_S = 30.0
ENDLESS: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": []}


class Setup:
    """Starts pods as processes of one cluster over the shm backend."""

    def __init__(self, registry_url: str, runtime_dir: Path, stack: AsyncExitStack, cluster: str) -> None:
        self.registry_url = registry_url
        self._flags: dict[str, Any] = {
            "model": "fake",
            "runtime_dir": runtime_dir,
            "registry_url": registry_url,
            "cluster": cluster,
        }
        self._stack = stack
        self._cluster = cluster

    async def spawn(self, role: str, **flags: Any) -> PodProcess:
        """Does not wait for it."""
        flags = {"num_blocks": 64, "heartbeat_interval_s": 0.1, "drain_timeout_s": 10} | self._flags | flags
        return await self._stack.enter_async_context(PodProcess(role, **flags))

    async def start(self, *roles: str, **flags: object) -> list[PodProcess]:
        pods = [await self.spawn(role, **flags) for role in roles]
        await asyncio.gather(*(pod.until_ready() for pod in pods))
        return pods

    async def client(self, pod: PodProcess) -> PodClient:
        client = PodClient(pod.fields["address"])
        self._stack.push_async_callback(client.close)
        if pod.fields["role"] == "decode":
            await client.open_stream(await self.present_record(pod))
        return client

    async def present_record(self, pod: PodProcess) -> PodRecord:
        """Waits for it: on a busy machine a heartbeat comes later than its predecessor expires."""
        async with asyncio.timeout(WAIT_S):
            while (record := await self.record(pod)) is None:  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)
        return record

    async def record(self, pod: PodProcess) -> PodRecord | None:
        async with redis.asyncio.from_url(self.registry_url) as registry:
            stored = await registry.get(pod_key(self._cluster, pod.fields["pod_id"]))
            return PodRecord.FromString(stored) if isinstance(stored, bytes) else None


@pytest.fixture
async def setup(
    registry_url: str, runtime_dir: Path, request: pytest.FixtureRequest, no_leaked_tasks: None
) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield Setup(registry_url, runtime_dir, stack, request.node.name)


async def test_a_pod_says_that_it_is_ready_and_answers(setup: Setup) -> None:
    """READY line, record, health, reflection, metrics, and the resolved settings on stderr."""
    (pod,) = await setup.start("decode")
    assert (pod.fields["role"], set(pod.fields)) == ("decode", {"role", "pod_id", "address", "metrics"})
    record = await setup.record(pod)
    assert record is not None
    assert (record.state, record.address, record.max_model_len) == (POD_STATE_READY, pod.fields["address"], 1025)
    assert record.metrics_address == pod.fields["metrics"]
    async with grpc.aio.insecure_channel(pod.fields["address"]) as channel:
        health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "pdserve.v1.DecodePod", "pdserve.v1.KVTransfer"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        services = {service.name async for part in call for service in part.list_services_response.service}
        assert {"pdserve.v1.DecodePod", "pdserve.v1.KVTransfer", "grpc.health.v1.Health"} <= services
    assert 'pdserve_blocks{state="free"} 64.0' in await scrape(pod.fields["metrics"])
    pod.send(signal.SIGTERM)
    assert await pod.ended() == 0
    assert "engine=fake" in pod.stderr
    assert "num_blocks=64" in pod.stderr
    assert await setup.record(pod) is None


async def test_sigterm_lets_a_stream_finish(setup: Setup) -> None:
    prefill_pod, decode_pod = await setup.start("prefill", "decode", fake_step_s=0.005)
    prefill, decode = await setup.client(prefill_pod), await setup.client(decode_pod)
    fingerprint = await layout_fingerprint(setup, decode_pod)
    sequence = spec(range(40), max_tokens=60, **ENDLESS)
    answer = asyncio.create_task(generate(sequence, prefill, decode, fingerprint))
    await decode.received[sequence.sequence_id].until_tokens(2)
    prefill_pod.send(signal.SIGTERM)  # owes nothing any more
    decode_pod.send(signal.SIGTERM)

    async def draining() -> bool:
        record = await setup.record(decode_pod)
        return record is not None and record.state == POD_STATE_DRAINING

    await until(draining)
    assert await answer == list(right_answer(sequence).output_ids)
    assert await prefill_pod.ended() == 0
    assert await decode_pod.ended() == 0


async def layout_fingerprint(setup: Setup, pod: PodProcess) -> str:
    record = await setup.record(pod)
    assert record is not None
    return record.layout.fingerprint


async def test_a_second_signal_ends_the_drain(setup: Setup) -> None:
    (pod,) = await setup.start("decode", fake_step_s=0.02)
    client = await setup.client(pod)
    sequence = spec([1], max_tokens=1000, **ENDLESS)
    await client.start_decode(sequence)
    await client.received[sequence.sequence_id].until_tokens(1)
    pod.send(signal.SIGTERM)

    async def draining() -> bool:
        record = await setup.record(pod)
        return record is not None and record.state == POD_STATE_DRAINING

    await until(draining)
    pod.send(signal.SIGINT)
    await client.received[sequence.sequence_id].until_ended()
    assert client.received[sequence.sequence_id].error() is not None
    assert await pod.ended() == 0


async def test_kill_9_of_the_decode_pod_frees_the_prefill_pod(setup: Setup) -> None:
    """Its lease expires, nothing else is needed."""
    prefill_pod, decode_pod = await setup.start("prefill", "decode")
    prefill, decode = await setup.client(prefill_pod), await setup.client(decode_pod)
    await decode.reserve(sequence := spec(range(40)), await layout_fingerprint(setup, decode_pod))
    await prefill.prefill(sequence, lease_ms=300)
    assert "pdserve_leases 1.0" in await scrape(prefill_pod.fields["metrics"])
    decode_pod.send(signal.SIGKILL)

    async def freed() -> bool:
        return "pdserve_leases 0.0" in await scrape(prefill_pod.fields["metrics"])

    await until(freed)
    assert 'pdserve_blocks{state="free"} 64.0' in await scrape(prefill_pod.fields["metrics"])
    await until(lambda: gone(setup, decode_pod))


async def gone(setup: Setup, pod: PodProcess) -> bool:
    """The record of a killed pod expires."""
    return await setup.record(pod) is None


async def test_kill_9_of_the_prefill_pod_is_told_and_frees_the_decode_pod(setup: Setup) -> None:
    prefill_pod, decode_pod = await setup.start("prefill", "decode")
    prefill, decode = await setup.client(prefill_pod), await setup.client(decode_pod)
    fingerprint = await layout_fingerprint(setup, decode_pod)
    await generate(spec([1, 2]), prefill, decode, fingerprint)  # the two have met
    credit = await decode.reserve(sequence := spec(range(40)), fingerprint)
    response = await prefill.prefill(sequence)
    prefill_pod.send(signal.SIGKILL)
    await prefill_pod.ended()
    await decode.start_decode(continued(sequence, response), response.handoff, credit.credit_id)
    await decode.received[sequence.sequence_id].until_ended()
    assert isinstance(decode.received[sequence.sequence_id].error(), PeerLost)
    local = spec(range(40))
    await decode.start_decode(local)
    await decode.received[local.sequence_id].until_ended()
    assert decode.received[local.sequence_id].token_ids == list(right_answer(local).output_ids)


async def test_a_stopped_process_that_wakes_up_takes_up_again(setup: Setup) -> None:
    """SIGSTOP longer than its record lives, then SIGCONT: it registers again and serves."""
    (pod,) = await setup.start("decode")
    client = await setup.client(pod)
    pod.send(signal.SIGSTOP)
    await until(lambda: gone(setup, pod))
    pod.send(signal.SIGCONT)

    async def back() -> bool:
        return not await gone(setup, pod)

    await until(back)
    sequence = spec([1, 2, 3])
    await client.start_decode(sequence)
    await client.received[sequence.sequence_id].until_ended()
    assert client.received[sequence.sequence_id].token_ids == list(right_answer(sequence).output_ids)


async def test_a_killed_and_emptied_registry_is_filled_again(setup: Setup) -> None:
    server = RegistryServer()
    server.start()
    setup.registry_url = server.url
    (pod,) = await setup.start("decode", registry_url=server.url)
    server.kill()
    await asyncio.to_thread(server.start)

    async def back() -> bool:
        return not await gone(setup, pod)

    await until(back)
    pod.send(signal.SIGTERM)
    assert await pod.ended() == 0
    server.kill()


async def test_an_idle_pod_stops_at_once_though_its_registry_does_not_answer(setup: Setup) -> None:
    server = RegistryServer()
    server.start()
    (pod,) = await setup.start("decode", registry_url=server.url, drain_timeout_s=30)
    server.send(signal.SIGSTOP)
    await asyncio.sleep(0.3)  # a heartbeat hangs
    pod.send(signal.SIGTERM)
    async with asyncio.timeout(20):  # of the 30 s for which it would wait while it drains
        assert await pod.ended() == 0
    server.kill()


async def test_what_keeps_a_pod_from_starting_is_one_line(setup: Setup) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases: list[tuple[dict[str, object], str]] = [
            ({"port": taken.getsockname()[1]}, f"--port {taken.getsockname()[1]}: cannot listen on 127.0.0.1"),
            ({"metrics_port": taken.getsockname()[1]}, f"--metrics-port {taken.getsockname()[1]}: cannot"),
            ({"model": "/nowhere/at/all", "engine": "torch"}, "no such directory"),
            ({"num_blocks": 10**9}, "too little memory"),
            ({"registry_url": f"redis://127.0.0.1:{free_port()}/0"}, "cannot reach the registry"),
            ({"max_num_seqs": 0}, "max_num_seqs"),
            ({"cores": "99999"}, "--cores 99999: there is no core 99999; this process may use "),
            ({"max_num_seqs": 64, "max_batched_tokens": 8}, "max_batched_tokens = 8"),
        ]
        pods = [await setup.spawn("prefill", **flags) for flags, _ in cases]
        codes = await asyncio.gather(*(pod.ended() for pod in pods))
    for pod, code, (flags, message) in zip(pods, codes, cases, strict=True):
        *told, last = pod.stderr.strip().splitlines()
        assert code == 2, f"{flags}: {pod.stderr}"
        assert message in last, f"{flags}: {pod.stderr}"
        assert "Traceback" not in pod.stderr
        assert len(told) <= 1, f"{flags}: {pod.stderr}"  # the resolved settings
        assert pod.stdout == ""


async def test_14_a_call_to_a_frozen_pod_ends_and_the_pod_drops_it_when_it_wakes(setup: Setup) -> None:
    (pod,) = await setup.start("prefill", fake_prefill_s_per_token=0.02, max_batched_tokens=64)
    client = await setup.client(pod)
    call = asyncio.create_task(client.prefill(spec(range(500))))

    async def running() -> bool:
        return "pdserve_sequences_running 1.0" in await scrape(pod.fields["metrics"])

    await until(running)
    pod.send(signal.SIGSTOP)
    with pytest.raises(PodUnavailable, match="ping timeout"):
        await call
    pod.send(signal.SIGCONT)

    async def freed() -> bool:
        return 'pdserve_blocks{state="free"} 64.0' in await scrape(pod.fields["metrics"])

    await until(freed)


@pytest.mark.model
async def test_without_a_compiler_a_real_model_does_not_start(setup: Setup) -> None:
    flags = {"model": "smollm2-135m-instruct", "env": {"CXX": "/nowhere/c++"}}
    pod = await setup.spawn("prefill", **flags)
    assert await pod.ended() == 2
    assert "CPU kernels: CXX=/nowhere/c++" in pod.stderr.splitlines()[-1]
    assert "Traceback" not in pod.stderr
