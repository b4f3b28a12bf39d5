"""The settings of a router and a gateway that share a process: each one's own, from one command line.

`--router.OPTION` and `--gateway.OPTION` are the options of `python -m router` and `python -m gateway`; variables and
the sections of the file are those of the two as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from gateway.settings import GatewaySettings
from proto.settings import ConfigError, Settings, split_config
from router.settings import RouterSettings

PARTS = ("router", "gateway")
USAGE = """usage: python -m gateway.front [--config FILE] [--router.OPTION VALUE ...] [--gateway.OPTION VALUE ...]

Router and gateway in one process. The OPTIONs are those that `python -m router --help` and `python -m gateway --help`
list; --gateway.router is none, since the router is here."""

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class FrontSettings:
    router: RouterSettings
    gateway: GatewaySettings  # its `router` is not read

    @property
    def log_level(self) -> str:
        """Of all but the router's own loggers."""
        return self.gateway.log_level

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Settings from `argv` (default: the process's own), the environment and the file. Raises ConfigError."""
        config, rest = split_config(sys.argv[1:] if argv is None else argv)
        shared = ["--config", str(config)] if config else []
        options = split(rest)
        settings = cls(
            _load("router", RouterSettings, shared + options["router"]),
            _load("gateway", GatewaySettings, shared + options["gateway"]),
        )
        _check_ports(settings)
        return settings


def split(argv: Sequence[str]) -> dict[str, list[str]]:
    """The options of each of PARTS, without the prefix. Raises ConfigError."""
    options: dict[str, list[str]] = {part: [] for part in PARTS}
    part = ""
    for word in argv:
        if word.startswith("--"):
            part, _, option = word.removeprefix("--").partition(".")
            if part not in options or not option:
                raise ConfigError(f"{word}: options are --router.OPTION, --gateway.OPTION and --config")
            if part == "gateway" and option.partition("=")[0] == "router":
                raise ConfigError(f"{word}: the router is in this process")
            options[part].append(f"--{option}")
        elif part:
            options[part].append(word)
        else:
            raise ConfigError(f"{word!r} belongs to no option")
    return options


def _load(part: str, cls: type[S], argv: Sequence[str]) -> S:
    try:
        return cls.load(argv)
    except ConfigError as error:
        raise ConfigError(f"{part}: {error}") from None


def _check_ports(settings: FrontSettings) -> None:
    """PDSERVE_PORT, for one, sets both."""
    if settings.router.port == settings.gateway.port != 0:
        both = f"router.port and gateway.port are both {settings.gateway.port}"
        raise ConfigError(f"{both}: must differ, or be 0 for a free one")
