"""What a person reads whose settings are wrong."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings
from pdserve.__main__ import COMMANDS
from pdserve.settings import ExplainSettings, ModelSettings, UpSettings
from pod.settings import PodSettings
from proto.settings import ConfigError, Settings
from router.settings import RouterSettings

ADDRESS = "must be HOST:PORT, such as 127.0.0.1:50051"
PRINTABLE = "must hold printable characters only"
SIZE = "must be a number of bytes with or without a unit, such as 512MiB or 2GiB"


@pytest.mark.parametrize(
    ("settings", "argv", "message"),
    [
        (
            PodSettings,
            ["--speculation", "ngram", "--ngram-min", "5", "--ngram-max", "2"],
            "ngram_min = 5: must be at most ngram_max = 2",
        ),
        (
            PodSettings,
            ["--cores", "abc"],
            "setting 'cores' = 'abc': 'abc' must be a core or an ascending range of cores, as in 0-2,5",
        ),
        (UpSettings, ["--kv-memory", "abc"], f"setting 'kv_memory' = 'abc': {SIZE}"),
        (UpSettings, ["--kv-memory", "5 parsecs"], f"setting 'kv_memory' = '5 parsecs': {SIZE}"),
        (UpSettings, ["--served-model-name", "a\nb"], f"setting 'served_model_name' = 'a\\nb': {PRINTABLE}"),
        (
            RouterSettings,
            ["--model", "fake", "--served-model-name", "\0"],
            f"setting 'served_model_name' = '\\x00': {PRINTABLE}",
        ),
        *(
            (settings, ["--router", address], f"setting 'router' = {address!r}: {ADDRESS}")
            for settings in (GatewaySettings, ExplainSettings)
            for address in ("", "foo", "foo:bar", ":50051", "foo:", "foo:70000", "foo:0", "foo bar:1", "foo:1\n")
        ),
    ],
)
def test_a_wrong_setting_is_one_plain_line(settings: type[Settings], argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings.load(argv)
    assert str(refusal.value) == message


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:65535", "router:50051", "router.ns.svc.cluster.local:50051"])
def test_addresses_of_a_router(address: str) -> None:
    assert GatewaySettings.load(["--router", address]).router == address


@pytest.mark.parametrize("settings", [PodSettings, *COMMANDS.values(), RouterSettings, GatewaySettings])
def test_help_tells_defaults_that_say_something(
    settings: type[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        settings.load(["--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    assert "null" not in options
    assert "(default: )" not in options
    assert "factory" not in options
    assert "(default: " in options or settings in (ExplainSettings, ModelSettings)


def test_settings_that_contradict_each_other_show_no_password() -> None:
    with pytest.raises(ConfigError) as refusal:
        PodSettings.load(["--registry-url", "redis://:secret@host/0", "--num-blocks", "1", "--kv-memory", "1"])
    assert "secret" not in str(refusal.value)
