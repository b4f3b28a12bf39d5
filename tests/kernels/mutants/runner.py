"""Runs the tests of a kernel in a copy of the tree in which a mistake is planted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.mutants.catalogue import KERNELS, ROOT, Mutant

_TIMEOUT_S = 900
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "docs", "deploy")


@dataclass(frozen=True)
class Verdict:
    """`caught_by` is the first test that failed; None: the mutant survived."""

    mutant: Mutant
    caught_by: str | None
    seconds: float


class TestsDidNotRun(Exception):
    """Pytest could not collect the tests: the mutant is no program."""


def judge(mutant: Mutant) -> Verdict:
    """Raises SourceMovedOn or TestsDidNotRun."""
    path = KERNELS / f"{mutant.kernel}.py"
    mutated = mutant.applied(path.read_text())
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(ROOT, tree, ignore=_NOT_COPIED)
        (tree / path.relative_to(ROOT)).write_text(mutated)
        caught_by = first_failure(tree, [mutant.tests])
    return Verdict(mutant, caught_by, time.monotonic() - started)


def first_failure(tree: Path, tests: list[str]) -> str | None:
    """The first test in these files that fails in `tree`, None when all pass. Raises TestsDidNotRun."""
    folder = "tests/kernels/triton_interpreted"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "error", "--hypothesis-profile=mutants"]
    command = [sys.executable, "-m", "pytest", *options, *(f"{folder}/{name}.py" for name in tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_TIMEOUT_S} s"
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        return f"signal {-result.returncode}"
    failed = re.search(r"^FAILED \S+::(\w+)", result.stdout, re.MULTILINE)
    if failed is None:
        raise TestsDidNotRun(f"{' '.join(tests)}: pytest ended with {result.returncode}\n{result.stdout[-3000:]}")
    return failed[1]
