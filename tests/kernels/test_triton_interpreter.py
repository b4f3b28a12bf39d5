"""Runs tests/kernels/triton_interpreted/ in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton_interpreted"
ROOT = Path(__file__).parents[2]


@pytest.mark.triton_interpreter
def test_triton_kernels_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    profile = request.config.getoption("--hypothesis-profile")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    command += [f"--hypothesis-profile={profile}"] if profile else []
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"[1-9]\d* passed in .*", summary), summary
