"""Finds stop strings in text that arrives in pieces, and holds back what may be the beginning of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Matched(NamedTuple):
    """`text` is certain from now on; `match` is the stop string that ended it, whose own text is left out."""

    text: str
    match: str | None = None


class StopMatcher:
    """The match is the stop string that is complete first (of several, the longest), however the text was cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._held = ""  # a proper prefix of a stop string, not yet given out

    def feed(self, text: str, *, enabled: bool = True) -> Matched:
        """While not `enabled` (before min_tokens) a stop string that `text` completes is ordinary text."""
        if not self._stops:
            return Matched(text)
        buffer = self._held + text
        if enabled and (found := self._find(buffer)) is not None:
            self._held = ""
            stop, start = found
            return Matched(buffer[:start], stop)
        keep = self._num_to_hold(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Matched(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The text has ended: what was held back is ordinary."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[str, int] | None:
        """The stop string that ends first past what was held, and its start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[2], best[1])

    def _num_to_hold(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is a proper prefix of a stop string."""
        for length in range(min(len(self._stops[0]) - 1, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
