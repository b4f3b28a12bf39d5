"""These tests need a process in which Triton interprets: tests/kernels/test_triton_interpreter.py starts it."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.triton_interpreted import interpreter

    interpreter.install()
else:
    collect_ignore_glob.append("test_*.py")
