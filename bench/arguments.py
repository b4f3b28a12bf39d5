"""What the benchmarks' command lines share: types of options, and errors in a line instead of a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config_fields import CheckpointError


def positive(text: str) -> int:
    """An argparse type: a whole number, 1 or more. Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return value


def new_file(text: str) -> Path:
    """An argparse type: a file to write, asked for before minutes of measuring. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: must be a file in a directory that exists")
    return path


def exit_code(main: Callable[[], int | None]) -> int:
    """What `main` returns (0 for None); 2 and a line on stderr when it cannot use the checkpoint it was given."""
    try:
        return main() or 0
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
