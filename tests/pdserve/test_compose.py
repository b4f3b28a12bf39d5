"""docker-compose.yml without Docker: every command line and variable is accepted by the process it is for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from pdserve.paths import ROOT
from pod.settings import PodSettings
from proto.settings import Settings
from router.settings import RouterSettings

OURS: dict[str, tuple[str, type[Settings]]] = {
    "prefill": ("prefill_service", PodSettings),
    "decode": ("decode_service", PodSettings),
    "router": ("router", RouterSettings),
    "gateway": ("gateway", GatewaySettings),
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def environment(service: dict[str, Any]) -> dict[str, str]:
    """With `${NAME:-default}` resolved as where NAME is not set."""
    return {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in service.get("environment", {}).items()}


def test_services(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"redis", *OURS}


@pytest.mark.parametrize("name", OURS)
def test_settings_are_accepted(compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose["services"][name]
    module, settings_class = OURS[name]
    for variable, value in environment(service).items():
        monkeypatch.setenv(variable, value)
    assert service["command"][0] == module
    settings: Any = settings_class.load(service["command"][1:])
    assert settings.host == "0.0.0.0", "unreachable from other containers"
    if name != "gateway":
        assert settings.registry_url == "redis://redis:6379/0"
        assert settings.model == "smollm2-135m-instruct"


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting_of_someone(compose: dict[str, Any], name: str) -> None:
    fields = {field for _, cls in OURS.values() for field in cls.model_fields}
    names = {variable.removeprefix("PDSERVE_").lower() for variable in environment(compose["services"][name])}
    assert names <= fields


def test_pods_share_model_and_sockets(compose: dict[str, Any]) -> None:
    prefill, decode = compose["services"]["prefill"], compose["services"]["decode"]
    assert prefill["volumes"] == decode["volumes"]
    mounted = {volume.split(":")[0] for volume in prefill["volumes"]}
    assert mounted == set(compose["volumes"])
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for volume in prefill["volumes"]:
        assert volume.split(":")[1] in dockerfile, "a volume takes its owner from the image's directory"


def test_pods_can_be_scaled(compose: dict[str, Any]) -> None:
    for name in ("prefill", "decode"):
        assert not {"ports", "container_name", "hostname"} & set(compose["services"][name])


def test_only_loopback_is_published(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", OURS)
def test_health_checks_ask_the_port_that_is_served(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    port = service["command"][service["command"].index("--port") + 1]
    *_, script, kind, address = service["healthcheck"]["test"]
    assert (ROOT / script.removeprefix("/app/")).is_file()
    assert kind == ("http" if name == "gateway" else "grpc")
    assert address == f"127.0.0.1:{port}"
