"""Where this repository lies, and that its import names are really its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Other distributions install packages of these names: Hugging Face's `kernels` and `proto-plus`.
SHARED_NAMES = ("kernels", "proto")


def foreign_names() -> list[str]:
    """One line for each import name that does not resolve to this repository."""
    return [line for name in SHARED_NAMES if (line := _foreign(name))]


def _foreign(name: str) -> str:
    spec = importlib.util.find_spec(name)
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    if origin == ROOT / name / "__init__.py":
        return ""
    return f"import name {name!r} resolves to {origin or 'nothing'}, not to {ROOT / name}: run from {ROOT}"
