"""A pod as a whole: what it publishes, its self-check, and the crash of its engine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from engine.batch import Batch
from engine.fake import FAKE_MODEL, FakeRunner
from engine.sequence import SampledToken
from pod import build
from pod.errors import StartupError
from pod.plan import PodPlan, resolve
from pod.pod import Pod
from pod.settings import PodSettings
from proto.errors import InternalError
from proto.registry import pod_key
from proto.registry_pb2 import POD_STATE_READY, ROLE_DECODE, ROLE_PREFILL, PodRecord
from proto.settings import ConfigError
from tests.support.cluster import Cluster
from tests.support.crashing_pod import CrashingRunner
from tests.support.pod_client import PodClient, spec
from tests.support.polling import until
from tests.support.processes import PodProcess


async def record_of(cluster: Cluster, pod: Pod) -> PodRecord:
    async with redis.asyncio.from_url(cluster.registry_url) as registry:
        stored = await registry.get(pod_key(cluster.name, pod.plan.pod_id))
    assert isinstance(stored, bytes)
    return PodRecord.FromString(stored)


@pytest.mark.parametrize(("name", "role"), [("prefill", ROLE_PREFILL), ("decode", ROLE_DECODE)])
async def test_the_record_says_what_a_router_needs(cluster: Cluster, name: str, role: int) -> None:
    pod = await cluster.start(name, max_num_seqs=7)
    record = await record_of(cluster, pod)
    assert (record.pod_id, record.epoch, record.role) == (pod.plan.pod_id, pod.plan.epoch, role)
    assert (record.state, record.address) == (POD_STATE_READY, pod.address)
    assert record.token_address == ("" if role == ROLE_PREFILL else f"127.0.0.1:{pod.role.token_port}")
    assert (record.model_id, record.max_num_seqs) == ("fake", 7)
    assert record.max_model_len == 64 * 16 + 1  # the cache is smaller than the model's context
    assert record.layout == pod.plan.layout.to_proto()
    assert (record.load.num_blocks, record.load.num_free_blocks) == (64, 64)


async def test_load_is_published_with_the_heartbeat(cluster: Cluster) -> None:
    pod = await cluster.start("prefill", heartbeat_interval_s=0.02)
    client = cluster.client(pod)
    await client.prefill(sequence := spec([1, 2, 3]))

    async def leased() -> bool:
        return (await record_of(cluster, pod)).load.num_leases == 1

    await until(leased)
    await client.release_lease(sequence.sequence_id)


async def test_a_leak_is_reported_by_the_pod_itself(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks that the engine holds for nobody: planted, found after the next activity, counted once."""
    pod = await cluster.start("prefill", heartbeat_interval_s=0.02)
    client = cluster.client(pod)
    await client.prefill(sequence := spec([1, 2, 3]))
    entry = pod.role.table.get(sequence.sequence_id)  # type: ignore[attr-defined]  # the prefill role's own
    pod.role.table.remove(entry)  # type: ignore[attr-defined]  # likewise
    with caplog.at_level(logging.ERROR):
        await until(lambda: "do not balance" in caplog.text)
    assert pod.metrics.registry.get_sample_value("pdserve_invariant_violations_total") == 1
    assert await pod.engine.call(lambda core: core.release_held(sequence.sequence_id))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_crash_of_the_engine_fails_all_that_is_pending(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(build, "FakeRunner", CrashingRunner)
    pod = await cluster.start(role)
    client = cluster.client(pod)
    sequence = spec([13])
    if role == "prefill":
        call = asyncio.create_task(client.prefill(sequence))
    else:
        await client.open_stream(pod.record())
        await client.start_decode(sequence)
    await asyncio.wait_for(pod.ended.wait(), 5)
    cluster.pods.remove(pod)
    await pod.stop(InternalError(f"the engine crashed: {pod.crash}"))
    if role == "prefill":
        with pytest.raises(InternalError, match="out of luck"):
            await call
    else:
        error = client.received[sequence.sequence_id].error()
        assert isinstance(error, InternalError)
        assert "out of luck" in error.message


class NotFiniteRunner(FakeRunner):
    """On a prompt that begins with token 13."""

    def execute(self, batch: Batch) -> list[tuple[SampledToken, ...]]:
        drawn = zip(batch.sequences, super().execute(batch), strict=True)
        return [tuple(t._replace(finite=s.prompt_ids[0] != 13) for t in tokens) for s, tokens in drawn]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_logits_that_are_not_finite_fail_their_sequence_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(build, "FakeRunner", NotFiniteRunner)
    pod = await cluster.start(role)
    if role == "prefill":
        client = cluster.client(pod)
        with pytest.raises(InternalError, match="logits that are not finite"):
            await client.prefill(spec([13]))
        handoff = (await client.prefill(spec([14]))).handoff
        assert await client.release_lease(handoff.lease_id)
        return
    client = await cluster.decode_client(pod)
    bad, good = spec([13]), spec([14])
    for sequence in (bad, good):
        await client.start_decode(sequence)
        await client.received[sequence.sequence_id].until_ended()
    assert "logits that are not finite" in str(client.received[bad.sequence_id].error())
    assert client.received[good.sequence_id].error() is None


async def test_a_process_whose_engine_crashed_ends_with_1(cluster: Cluster) -> None:
    flags: dict[str, Any] = {"model": "fake", "cluster": cluster.name, "registry_url": cluster.registry_url}
    async with PodProcess("prefill", module="tests.support.crashing_pod", num_blocks=8, **flags) as process:
        fields = await process.until_ready()
        assert process.warnings[-1] == "WARNING out of luck on 13\n"
        client = PodClient(fields["address"])
        with pytest.raises(InternalError, match="out of luck"):
            await client.prefill(spec([13]))
        await client.close()
        assert await process.ended() == 1
        assert "the engine crashed" in process.stderr


async def test_a_runtime_dir_that_cannot_be_used_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot set up shm transfers"):
        await cluster.start("decode", transfer_backend="shm", runtime_dir=tmp_path / "file")


async def test_a_taken_token_port_is_one_line(cluster: Cluster) -> None:
    taken = (await cluster.start("decode")).role.token_port
    with pytest.raises(StartupError, match=f"--token-port {taken}: cannot listen on 127.0.0.1: .*in use.*; choose"):
        await cluster.start("decode", token_port=taken)


def resolved(**settings: object) -> PodPlan:
    return resolve(PodSettings.model_validate(settings), "decode")


def test_settings_left_open_are_resolved() -> None:
    plan = resolved(model="fake")
    assert (plan.engine, plan.model, plan.model_dir) == ("fake", FAKE_MODEL, None)
    assert plan.pod_id.startswith("decode-")
    assert plan.epoch != resolved(model="fake").epoch
    assert plan.num_blocks == 64 * 4096 // 16  # all that max_num_seqs can use, as it is little
    assert plan.num_threads >= 1
    assert f"num_blocks={plan.num_blocks}" in plan.describe()


def test_a_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(StartupError, match="device = cuda: pods cannot serve from a GPU yet, because KV blocks move"):
        resolved(model="fake", device="cuda")


def test_the_cache_s_size_can_be_given_in_bytes() -> None:
    assert resolved(model="fake", kv_memory=10_000).num_blocks == 10_000 // 256


def test_a_cache_too_small_to_be_useful_is_told() -> None:
    warning = "the KV cache holds 1008 tokens, longer requests are refused: raise"
    assert resolved(model="fake", num_blocks=63).warnings == [f"{warning} --num-blocks"]
    assert resolved(model="fake", kv_memory=64 * 256 - 1).warnings == [f"{warning} --kv-memory"]
    assert resolved(model="fake", kv_memory=64 * 256).warnings == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_memory": 100}, "--kv-memory 100 bytes: must be at least 256 bytes, one KV block"),
        ({"num_blocks": 10**9}, r"too little memory.*--kv-memory or"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        resolved(model="fake", **settings)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-blocks", "4", "--kv-memory", "4096"], "give one of them"),
        (["--port", "70000"], "port"),
        (["--cluster", "a b"], "cluster"),
        (["--heartbeat-interval-s", "0"], "heartbeat_interval_s"),
        (["--engine", "steam"], "engine"),
    ],
)
def test_bad_settings_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PodSettings.load(argv)


def test_a_host_for_all_is_not_what_others_are_told() -> None:
    assert resolved(model="fake", host="0.0.0.0").advertise_host not in {"0.0.0.0", ""}
    assert resolved(model="fake", advertise_host="pod.example").advertise_host == "pod.example"
