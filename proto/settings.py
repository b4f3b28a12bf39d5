"""The base of every process's settings: frozen, validated, from flags > environment (PDSERVE_...) > YAML file.

`--config FILE` (or PDSERVE_CONFIG) names the file. One file may serve all processes: a class reads the mapping under
its own `section` name and nothing else, so a key it does not know there is an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsConfigDict


class ConfigError(Exception):
    """One line that says which setting is wrong and what is allowed."""


class Settings(BaseSettings):
    """Derive from this, set `section`, give each field a description, and call `load()` in `__main__`."""

    section: ClassVar[str]

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="PDSERVE_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
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
            return CliApp.run(cls, cli_args=rest, **read_section(config, cls.section))
        except ValidationError as error:
            raise ConfigError("; ".join(describe(e) for e in error.errors())) from None


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
        content = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: {error}") from None
    values = content.get(section) or {} if isinstance(content, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: expected a mapping of sections, each a mapping of settings")
    return values


def describe(error: Any) -> str:
    """One pydantic error as `setting 'port' = 70000: Input should be less than 65536`."""
    name = ".".join(str(part) for part in error["loc"])
    return f"setting {name!r} = {error['input']!r}: {error['msg']}"
