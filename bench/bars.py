"""The bars that every benchmark answers: what a value must reach, whether it does, and how that is told and stored."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Op = Literal[">=", "<="]


@dataclass(frozen=True, slots=True)
class Bar:
    """`values` has one for each round; empty: `why_not` says why. A bar without a threshold only informs."""

    name: str
    values: tuple[float, ...]
    op: Op = ">="
    threshold: float | None = None
    why_not: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """PASS, FAIL, INFO or NOT-RUN."""
        if self.median is None:
            return "NOT-RUN"
        if self.threshold is None:
            return "INFO"
        passed = self.median >= self.threshold if self.op == ">=" else self.median <= self.threshold
        return "PASS" if passed else "FAIL"

    def line(self) -> str:
        """`BAR name value op threshold verdict`, with the spread over rounds, or why there is no value."""
        bound = "- -" if self.threshold is None else f"{self.op} {self.threshold:.2f}"
        if self.median is None:
            return f"BAR {self.name} - {bound} NOT-RUN ({self.why_not})"
        spread = f" ({min(self.values):.3f}..{max(self.values):.3f} of {len(self.values)})"
        return f"BAR {self.name} {self.median:.3f} {bound} {self.verdict}{spread if len(self.values) > 1 else ''}"

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.median,
            "values": self.values,
            "op": self.op,
            "threshold": self.threshold,
            "verdict": self.verdict,
            "why_not": self.why_not,
        }


def report(bars: Sequence[Bar], file: Path | None, **details: object) -> None:
    """Prints a line a bar; where `file` is given writes all bars there, and `details` beside them."""
    for bar in bars:
        print(bar.line())
    if file is not None:
        file.write_text(json.dumps({"bars": [bar.as_json() for bar in bars], **details}, indent=2) + "\n")
