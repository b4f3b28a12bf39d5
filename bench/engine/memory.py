"""Resident memory of processes, from /proc/PID/smaps_rollup, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resident:
    """`rss` counts a page that several processes map in each of them, `pss` divides it among them."""

    rss: int
    pss: int

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.rss + other.rss, self.pss + other.pss)


NOTHING = Resident(0, 0)


def parse_rollup(text: str) -> Resident:
    """Of the file's lines such as `Pss:  123 kB`."""
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    rss, pss = (int(fields[name].split()[0]) << 10 for name in ("Rss", "Pss"))
    return Resident(rss, pss)


def resident(pids: Iterable[int], proc: Path = Path("/proc")) -> Resident:
    """The sum over `pids`; one that has ended counts nothing."""
    total = NOTHING
    for pid in pids:
        with suppress(OSError):
            total += parse_rollup((proc / str(pid) / "smaps_rollup").read_text())
    return total
