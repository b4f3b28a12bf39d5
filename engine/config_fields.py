"""Typed access to a checkpoint's JSON files, with one-line errors. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CheckpointError(Exception):
    """A model cannot be used; one line says what is wrong and what to do."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises CheckpointError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: give a Hugging Face model directory or a GGUF file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return values


class Fields:
    """A JSON object's fields; null counts as absent, as in the files that transformers writes.

    Each getter raises CheckpointError, naming `source`, for a value of another kind or a missing one without default.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be a whole number of at least {least}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, "must be a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def items(self, name: str) -> list[Any]:
        """A list; absent, an empty one."""
        value = self._get(name, [])
        if not isinstance(value, list):
            raise self.error(name, "must be a list")
        return value

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def error(self, name: str, allowed: str) -> CheckpointError:
        """For the caller to raise."""
        return CheckpointError(f"{self._source}: {name} = {self._values.get(name)!r}: {allowed}")

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._source}: {name} is missing")
        return value
