"""The cores a pod computes on: `--cores 0-3,8` as a set, and the pinning of every thread to it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from pod.errors import StartupError

_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_cores(text: str) -> frozenset[int]:
    """ "0-2,5" -> {0, 1, 2, 5}; "" -> no core. Raises ValueError that says what is allowed."""
    return frozenset(core for part in text.split(",") for core in _parse_range(part)) if text else frozenset()


def _parse_range(part: str) -> range:
    match = _RANGE.fullmatch(part.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ValueError(f"{part!r} must be a core or an ascending range of cores, as in 0-2,5")
    return range(first, last + 1)


def format_cores(cores: Collection[int]) -> str:
    """{0, 1, 2, 5} -> "0-2,5": what `parse_cores` reads."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def pin(cores: Collection[int]) -> None:
    """Moves all threads of this process to `cores`; those started later inherit them. Does nothing without cores.

    Raises StartupError for cores that this machine, or this process's container, does not have.
    """
    allowed = os.sched_getaffinity(0)
    if missing := set(cores) - allowed:
        have, want, lack = map(format_cores, (allowed, cores, missing))
        raise StartupError(f"--cores {want}: there is no core {lack}; this process may use {have}")
    if cores:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
