"""What is divided by what, and what it must reach: goals that become bars once all they need was measured.

A measurement is one number for an arm (a server in one configuration) and a metric in one round. A goal's value is a
function of measurements of the same round, so that what slowed both slowed both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.bars import Bar, Op

Key = tuple[str, str]  # arm, metric
Round = Mapping[Key, float]

ABSENT = "not asked for in this run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`value` gets what stands under `needs`, in that order. A goal without a threshold only informs."""

    name: str
    needs: tuple[Key, ...]
    value: Callable[..., float]
    op: Op = ">="
    threshold: float | None = None


def evaluate(goals: Sequence[Goal], rounds: Sequence[Round], not_run: Mapping[str, str]) -> list[Bar]:
    """`not_run`: arm -> why it did not run, wholly or from some round on."""
    return [_evaluate(goal, rounds, not_run) for goal in goals]


def _evaluate(goal: Goal, rounds: Sequence[Round], not_run: Mapping[str, str]) -> Bar:
    complete = [each for each in rounds if all(key in each for key in goal.needs)]
    values = tuple(goal.value(*(each[key] for key in goal.needs)) for each in complete)
    return Bar(goal.name, values, goal.op, goal.threshold, "" if values else _why_not(goal, rounds, not_run))


def _why_not(goal: Goal, rounds: Sequence[Round], not_run: Mapping[str, str]) -> str:
    """ABSENT when something is missing that nothing prevented: this run was not to measure it."""
    missing = dict.fromkeys(arm for arm, metric in goal.needs if not any((arm, metric) in each for each in rounds))
    if any(arm not in not_run for arm in missing):
        return ABSENT
    return "; ".join(f"{arm}: {not_run[arm]}" for arm in missing) or "no round measured all of it"


def ratio(a: float, b: float) -> float:
    return a / b
