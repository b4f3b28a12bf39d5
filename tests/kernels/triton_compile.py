"""Compiles every Triton kernel for GPUs that are not here and looks at the machine code.

    python -m tests.kernels.triton_compile [TARGET ...] [--only TEXT] [--quick] [--write]

The interpreter accepts what the compiler refuses, and neither says what the machine code is worth. For each target,
kernel and configuration: registers, spilled bytes, shared memory, matrix instructions, share of the bytes that come by
wide loads. Ends with 1 when a figure breaks a limit (compiled/expectations.py) or is worse than in
docs/kernels-compiled.md, and names target, kernel, configuration, figure and limit. `--write` writes what was compiled
into that table. `--quick` compiles the part that CI does, `--only` the configurations with a text in their names.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.kernels.compiled import table
from tests.kernels.compiled.table import Result, Row
from tests.kernels.compiled.targets import TARGETS

TABLE = Path(__file__).parents[2] / "docs" / "kernels-compiled.md"


def compile_all(targets: Sequence[str], quick: bool, only: str) -> Result:
    """A process a target, as many at a time as there are cores: Triton holds the interpreter's lock."""
    workers = min(len(targets), len(os.sched_getaffinity(0)))
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    with pool:
        results = list(pool.map(table.compile_rows, targets, repeat(quick), repeat(only)))
    return Result([row for r in results for row in r.rows], [text for r in results for text in r.violations])


def write(rows: Sequence[Row]) -> None:
    """Replaces the table, keeps the text before it."""
    before, _, _ = TABLE.read_text().partition(table.HEADER)
    TABLE.write_text(before + table.to_markdown(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations with it in their names")
    parser.add_argument("--quick", action="store_true", help="the configurations that CI compiles")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"TARGET = {', '.join(sorted(unknown))}: must be of {', '.join(TARGETS)}")
    complete = not (arguments.targets or arguments.quick or arguments.only)
    result = compile_all(arguments.targets or list(TARGETS), arguments.quick, arguments.only)
    print(table.to_markdown(result.rows), end="")
    reference = table.from_markdown(TABLE.read_text())
    violations = list(result.violations)
    if arguments.write:
        write(result.rows if complete else table.merged(reference, result.rows))
    else:
        violations += table.regressions(result.rows, reference)
        violations += table.stale(result.rows, reference) if complete else ()
    for violation in violations:
        print(violation, file=sys.stderr)
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
