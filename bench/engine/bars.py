"""The bars: what is divided by what, what it must reach, and what stands there when it could not be measured.

A measurement is one number for an arm (a server in one configuration) and a metric in one round. A bar's value is the
median over rounds of a function of measurements of the same round, so that what slowed both slowed both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Key = tuple[str, str]  # arm, metric
Op = Literal[">=", "<="]
Round = Mapping[Key, float]

ABSENT = "not asked for in this run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`value` gets what stands under `needs`, in that order. A bar without a threshold only informs."""

    name: str
    needs: tuple[Key, ...]
    value: Callable[..., float]
    op: Op = ">="
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`values` has one for each round that measured all of `bar.needs`; empty: `why_not` says why."""

    bar: Bar
    values: tuple[float, ...]
    why_not: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        if self.median is None:
            return "NOT-RUN"
        if self.bar.threshold is None:
            return "INFO"
        above = self.median >= self.bar.threshold
        return "PASS" if above == (self.bar.op == ">=") or self.median == self.bar.threshold else "FAIL"

    @property
    def was_asked_for(self) -> bool:
        return bool(self.values) or self.why_not != ABSENT

    def line(self) -> str:
        """`BAR name value op threshold verdict`, with the spread over rounds, or why there is no value."""
        bound = "- -" if self.bar.threshold is None else f"{self.bar.op} {self.bar.threshold:.2f}"
        if self.median is None:
            return f"BAR {self.bar.name} - {bound} NOT-RUN ({self.why_not})"
        spread = f" ({min(self.values):.3f}..{max(self.values):.3f} of {len(self.values)})"
        return f"BAR {self.bar.name} {self.median:.3f} {bound} {self.verdict}{spread if len(self.values) > 1 else ''}"


def evaluate(bars: Sequence[Bar], rounds: Sequence[Round], not_run: Mapping[str, str]) -> list[Result]:
    """`not_run`: arm -> why it did not run, wholly or from some round on."""
    return [_evaluate(bar, rounds, not_run) for bar in bars]


def _evaluate(bar: Bar, rounds: Sequence[Round], not_run: Mapping[str, str]) -> Result:
    complete = [each for each in rounds if all(key in each for key in bar.needs)]
    values = tuple(bar.value(*(each[key] for key in bar.needs)) for each in complete)
    return Result(bar=bar, values=values, why_not="" if values else _why_not(bar, rounds, not_run))


def _why_not(bar: Bar, rounds: Sequence[Round], not_run: Mapping[str, str]) -> str:
    """ABSENT when something is missing that nothing prevented: this run was not to measure it."""
    missing = dict.fromkeys(arm for arm, metric in bar.needs if not any((arm, metric) in each for each in rounds))
    if any(arm not in not_run for arm in missing):
        return ABSENT
    return "; ".join(f"{arm}: {not_run[arm]}" for arm in missing) or "no round measured all of it"


def ratio(a: float, b: float) -> float:
    return a / b
