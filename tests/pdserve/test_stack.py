"""Settings to command lines: what is started, in which order, and that every process accepts its own flags."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.front_settings import FrontSettings
from gateway.settings import GatewaySettings
from pdserve.process import ProcessSpec
from pdserve.settings import UpSettings
from pdserve.stack import Plan, divide_cores, process_specs, threads_per_pod
from pod.settings import PodSettings
from proto.settings import Settings
from router.settings import RouterSettings

SETTINGS: dict[str, type[Settings] | type[FrontSettings]] = {
    "prefill_service": PodSettings,
    "decode_service": PodSettings,
    "router": RouterSettings,
    "gateway": GatewaySettings,
    "gateway.front": FrontSettings,
}
APART = ("--front", "apart")


def plan(
    *argv: str,
    registry_binary: Path | None = Path("/bin/valkey-server"),
    threads: int = 1,
    cores: tuple[str, ...] | None = None,
) -> Plan:
    settings = UpSettings.load(argv)
    return Plan(
        settings=settings,
        model="/models/smol",
        run_dir=Path("/run/pdserve"),
        port=8001,
        router_port=50052,
        threads_per_pod=threads,
        pod_cores=cores or ("",) * (settings.num_prefill + settings.decode),
        registry_binary=registry_binary,
    )


def loaded(spec: ProcessSpec) -> Any:
    """The settings that the process of `spec` will see."""
    _, flag, module, *arguments = spec.command
    assert flag == "-m"
    return SETTINGS[module].load(arguments)


def by_name(a_plan: Plan) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in process_specs(a_plan)}


def test_default_stack() -> None:
    assert list(by_name(plan())) == ["registry", "prefill-0", "decode-0", "router+gateway"]
    assert list(by_name(plan(*APART))) == ["registry", "prefill-0", "decode-0", "router", "gateway"]


def test_every_process_reads_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("pod: {block_size: 32}\nrouter: {}\n")
    monkeypatch.chdir(tmp_path)
    specs, together = by_name(plan("--config", "c.yaml", *APART)), by_name(plan("--config", "c.yaml"))
    monkeypatch.chdir("/")
    assert loaded(specs["prefill-0"]).block_size == 32
    assert loaded(specs["router"]).port == 50052
    assert str(tmp_path / "c.yaml") in specs["gateway"].command
    assert str(tmp_path / "c.yaml") in together["router+gateway"].command


def test_pools_are_sized_independently() -> None:
    names = list(by_name(plan("--prefill", "2", "--decode", "3")))
    assert names[1:6] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]


def test_colocated_has_no_prefill_pods() -> None:
    assert list(by_name(plan("--colocated"))) == ["registry", "decode-0", "router+gateway"]


def test_pods_accept_their_flags() -> None:
    sizes = ("--max-num-seqs", "8", "--max-batched-tokens", "96", "--tensor-parallel", "2")
    argv = ("--dtype", "float32", "--kv-dtype", "bf16", "--kv-memory", "64MiB", *sizes)
    for name in ("prefill-0", "decode-0"):
        settings = loaded(by_name(plan(*argv, threads=3))[name])
        assert (settings.host, settings.port, settings.pod_id) == ("127.0.0.1", 0, name)
        assert settings.registry_url == "unix:///run/pdserve/registry.sock"
        assert settings.runtime_dir == Path("/run/pdserve/kv")
        assert (settings.model, settings.engine) == ("/models/smol", "torch")
        assert (settings.dtype, settings.kv_dtype) == ("float32", "bf16")
        assert (settings.kv_memory, settings.num_threads) == (64 << 20, 3)
        assert (settings.max_num_seqs, settings.max_batched_tokens, settings.tensor_parallel) == (8, 96, 2)


def test_decode_pods_alone_are_told_to_speculate() -> None:
    specs = by_name(replace(plan("--speculation", "draft", "--draft-model", "tiny"), draft_model="/models/tiny"))
    settings = loaded(specs["decode-0"])
    assert (settings.speculation, settings.draft_model) == ("draft", "/models/tiny")
    assert loaded(specs["prefill-0"]).speculation == "off"


def test_router_and_gateway_accept_their_flags() -> None:
    options = ("--served-model-name", "smol", "--cluster", "c", "--host", "127.0.0.2")
    specs, together = by_name(plan(*options, *APART)), loaded(by_name(plan(*options))["router+gateway"])
    router, gateway = loaded(specs["router"]), loaded(specs["gateway"])
    assert (router.host, router.port, router.model) == ("127.0.0.2", 50052, "/models/smol")
    assert (router.served_model_name, router.cluster) == ("smol", "c")
    assert router.registry_url == "unix:///run/pdserve/registry.sock"
    assert (gateway.host, gateway.port, gateway.router) == ("127.0.0.2", 8001, "127.0.0.2:50052")
    assert together.router == router
    assert together.gateway.model_copy(update={"router": gateway.router}) == gateway


def test_unset_options_are_left_to_the_pod() -> None:
    command = by_name(plan())["decode-0"].command
    assert not {"--dtype", "--kv-memory", "--max-num-seqs", "--max-batched-tokens", "--tensor-parallel"} & set(command)


def test_pods_in_a_shared_registry_name_themselves() -> None:
    specs = by_name(plan("--registry-url", "redis://127.0.0.1:7000/0", registry_binary=None))
    assert "registry" not in specs
    assert loaded(specs["decode-0"]).pod_id == ""
    assert loaded(specs["decode-0"]).registry_url == "redis://127.0.0.1:7000/0"


@pytest.mark.parametrize("fronts", [[{"router+gateway"}], [{"gateway"}, {"router"}]])
def test_the_stop_follows_a_requests_way_and_the_registry_starts_first(fronts: list[set[str]]) -> None:
    specs = process_specs(plan("--front", "together" if len(fronts) == 1 else "apart"))
    stops = itertools.groupby(sorted(specs, key=lambda s: s.stop_stage), key=lambda s: s.stop_stage)
    assert [{s.name for s in group} for _, group in stops] == [
        *fronts,
        {"prefill-0", "decode-0"},
        {"registry"},
    ]
    assert [s.name for s in specs if s.start_stage == 0] == ["registry"]


@pytest.mark.parametrize("name", ["gateway", "decode-0"])
def test_who_drains_is_killed_only_after_that(name: str) -> None:
    spec = by_name(plan("--drain-timeout-s", "7", *APART))[name]
    assert spec.stop_grace_s > loaded(spec).drain_timeout_s == 7


def test_together_there_is_time_for_both_to_stop() -> None:
    together, apart = by_name(plan("--drain-timeout-s", "7")), by_name(plan("--drain-timeout-s", "7", *APART))
    assert loaded(together["router+gateway"]).gateway.drain_timeout_s == 7
    assert together["router+gateway"].stop_grace_s == apart["router"].stop_grace_s + apart["gateway"].stop_grace_s


@pytest.mark.parametrize(("cores", "pods", "threads"), [(2, 1, 2), (2, 2, 1), (2, 5, 1), (16, 3, 5)])
def test_cores_are_divided(cores: int, pods: int, threads: int) -> None:
    assert threads_per_pod(cores, pods) == threads


@pytest.mark.parametrize(
    ("cores", "pods", "threads", "expected"),
    [
        ((0, 1), 1, 2, ("0-1",)),
        ((0, 1), 2, 1, ("0", "1")),
        ((4, 5, 8, 9), 2, 2, ("4-5", "8-9")),
        ((0, 1, 2), 1, 2, ("0-1",)),
        ((0, 1), 2, 2, ("", "")),
        ((0, 1), 3, 1, ("", "", "")),
    ],
)
def test_pods_get_cores_of_their_own_where_there_are_enough(
    cores: tuple[int, ...], pods: int, threads: int, expected: tuple[str, ...]
) -> None:
    assert divide_cores(cores, pods, threads) == expected


def test_pods_are_told_their_cores_and_the_front_none() -> None:
    specs = by_name(plan("--prefill", "1", "--decode", "2", cores=("0", "1", "")))
    assert [loaded(specs[name]).cores for name in ("prefill-0", "decode-0", "decode-1")] == ["0", "1", ""]
    assert not [name for name in ("registry", "router+gateway") if "--cores" in specs[name].command]
