"""Compiles to bytecode what the processes of a stack import: `python requirements/warm.py`, from the repository root.

Packages are installed without bytecode, since most of it would never be read. This writes the rest even where
PYTHONDONTWRITEBYTECODE is set, else every start of torch would compile some 2,000 modules anew.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = ("pdserve", "router", "gateway", "prefill_service", "decode_service")
LOADED_LATER = (
    "gateway.front",
    "pdserve.demo",
    "pdserve.doctor",
    "pdserve.explain",
    "engine.runner",
    "redis",
    "uvicorn.protocols.http.httptools_impl",
)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = False
    for name in (*(f"{process}.__main__" for process in PROCESSES), *LOADED_LATER):
        importlib.import_module(name)
    _ = importlib.import_module("transformers").PreTrainedTokenizerFast  # transformers loads lazily


if __name__ == "__main__":
    main()
