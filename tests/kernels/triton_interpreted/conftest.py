"""These tests need a process in which Triton interprets: tests/kernels/test_triton_interpreter.py starts it.

They draw few examples, the same ones every time, unless `--hypothesis-profile=thorough` asks for many new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

collect_ignore_glob: list[str] = []

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.triton_interpreted import interpreter

    interpreter.install()
    settings.load_profile("few")  # before pytest looks at --hypothesis-profile
else:
    collect_ignore_glob.append("test_*.py")
