"""The base of every process's settings: frozen, validated, from flags > environment (PDSERVE_...) > YAML file.

`--config FILE` (or PDSERVE_CONFIG) names the file. One file may serve all processes: a class reads the mapping under
its own `section` name and nothing else, so a key it does not know there is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

# Of all processes, since they share a file: a misspelt section would otherwise be ignored by each of them.
SECTIONS = ("pdserve", "pod", "router", "gateway", "explain", "model", "doctor")


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not re.fullmatch(r"\S+", host) or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:50051")
    return value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must hold printable characters only")
    return value


# What several processes have among their settings.
Port = Annotated[int, Field(ge=0, le=65535)]
LogLevel = Literal["debug", "info", "warning", "error"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]  # of a deployment or a pod: a part of a registry key
Address = Annotated[str, AfterValidator(_address)]  # of another process
ModelName = Annotated[str, Field(max_length=256), AfterValidator(_printable)]  # as clients write it

_SIZE = "must be a number of bytes with or without a unit, such as 512MiB or 2GiB"
_PLAINER = {"extra_forbidden": "no such setting", "byte_size": _SIZE, "byte_size_unit": _SIZE}  # than pydantic's words
_NO_DEFAULT = re.compile(r" \(default(: (null)?| factory: \w+)\)$")


class ConfigError(Exception):
    """One line that says which setting is wrong and what is allowed."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Without the defaults of what is unset or empty: the description says what that means."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return _NO_DEFAULT.sub("", action.help) if action.help else action.help


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


class Settings(BaseSettings):
    """Derive from this, set `section`, give each field a description, and call `load()` in `__main__`."""

    section: ClassVar[str]

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="PDSERVE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings  # flags come before both; the file's values are passed as init

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Settings from `argv` (default: the process's own), the environment and the file. Raises ConfigError."""
        config, rest = split_config(sys.argv[1:] if argv is None else argv)
        try:
            source: CliSettingsSource[Any] = CliSettingsSource(cls, formatter_class=_Help)
            return CliApp.run(cls, cli_args=rest, cli_settings_source=source, **read_section(config, cls.section))
        except ValidationError as error:
            raise ConfigError("; ".join(describe(e) for e in error.errors())) from None
        except SettingsError as error:
            raise ConfigError(f"{str(error).removeprefix('error parsing CLI: ')}; --help lists the options") from None


def split_config(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that `--config` or PDSERVE_CONFIG names, and the arguments without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=os.environ.get("PDSERVE_CONFIG"))
    known, rest = parser.parse_known_args(argv)
    return known.config, rest


def read_section(file: Path | str | None, section: str) -> dict[str, Any]:
    """The mapping under `section` in YAML `file`; empty without a file or section. Raises ConfigError."""
    if file is None:
        return {}
    try:
        content = yaml.load(Path(file).read_text(), _Loader)
    except (OSError, yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a date such as 2026-99-99
        raise ConfigError(f"--config {file}: {' '.join(str(error).split())}") from None
    sections = _mapping(content, f"--config {file}: expected a mapping of sections")
    if unknown := [repr(name) for name in sections if name not in SECTIONS]:
        raise ConfigError(f"--config {file}: unknown section {', '.join(unknown)}: known are {', '.join(SECTIONS)}")
    return _mapping(sections.get(section), f"--config {file}: section {section!r}: expected a mapping of settings")


def _mapping(content: Any, complaint: str) -> dict[str, Any]:
    """`content`, or an empty mapping where there is none. Raises ConfigError for anything else."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(complaint)
    return content


def describe(error: Any) -> str:
    """One pydantic error as `setting 'port' = 70000: Input should be less than 65536`.

    A complaint about several settings names them itself; its input is all of them, secrets too, and is not shown.
    """
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"setting {name!r} is required"
    if error["type"] == "value_error":  # raised by a validator of ours; pydantic's text of it has a prefix
        complaint = str(error["ctx"]["error"])
    else:
        complaint = _PLAINER.get(error["type"], error["msg"])
    return f"setting {name!r} = {error['input']!r}: {complaint}" if name else complaint
