"""How many drafts a step is worth. Pure; times come in.

A draft that is right saves its sequence a step. Any draft is one more row of the step, which costs little where a step
waits for the weights to be read, and its share where it computes. So a draft pays when its chance of being right, by
the cost of a row, exceeds what the step yields anyway, tokens by time. With few sequences that allows unlikely drafts;
with many only likely ones, or none.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

_RECENT = 0.9  # weight of the past at each draft seen: about the last ten count


@dataclass(slots=True)
class Acceptance:
    """How often one sequence's drafts are right, lately; a new one is given the benefit of the doubt."""

    num_right: float = 1.0
    num_seen: float = 2.0

    @property
    def rate(self) -> float:
        """The chance that a draft is right when those before it are."""
        return self.num_right / self.num_seen

    def see(self, draft_ids: Seq[int], token_ids: Seq[int]) -> None:
        """Compares drafts with the tokens that came; what follows a wrong one says nothing."""
        for draft_id, token_id in zip(draft_ids, token_ids, strict=False):
            is_right = draft_id == token_id
            self.num_right = _RECENT * self.num_right + is_right
            self.num_seen = _RECENT * self.num_seen + 1
            if not is_right:
                return


class StepCost:
    """What decode steps take as a function of their rows: a straight line through those of late.

    Fitted by least squares over exponentially weighted steps. While the number of rows hardly varies the slope follows
    a prior: `PRIOR_ROW_COST` of a step of one row.
    """

    PRIOR_ROW_COST = 0.1
    _PAST = 0.98  # weight of the past at each step: about the last fifty count
    _PRIOR_VARIANCE = 0.25  # rows squared: how much variation outweighs the prior
    _SMALLEST, _LARGEST = 0.005, 1.0  # a row is never free, and never dearer than a step of its own

    def __init__(self) -> None:
        self._weight = self._rows = self._time = self._rows_squared = self._rows_time = 0.0

    def record(self, num_rows: int, duration_s: float) -> None:
        past = self._PAST
        self._weight = past * self._weight + 1
        self._rows = past * self._rows + num_rows
        self._time = past * self._time + duration_s
        self._rows_squared = past * self._rows_squared + num_rows * num_rows
        self._rows_time = past * self._rows_time + num_rows * duration_s

    @property
    def first_row_s(self) -> float:
        """What a step of one row takes; 0 before anything was recorded."""
        return self._fit()[0]

    @property
    def row_cost(self) -> float:
        """What one more row costs, as a part of a step of one row."""
        first_row_s, slope_s = self._fit()
        if first_row_s <= 0:
            return self._LARGEST if slope_s > 0 else self.PRIOR_ROW_COST
        return min(max(slope_s / first_row_s, self._SMALLEST), self._LARGEST)

    def _fit(self) -> tuple[float, float]:
        """Seconds of a step of one row and of each further row."""
        if self._weight == 0:
            return 0.0, 0.0
        rows, time_s = self._rows / self._weight, self._time / self._weight
        variance = self._rows_squared / self._weight - rows * rows
        covariance = self._rows_time / self._weight - rows * time_s
        prior_slope_s = self.PRIOR_ROW_COST * time_s / (1 + self.PRIOR_ROW_COST * (rows - 1))
        slope_s = (covariance + self._PRIOR_VARIANCE * prior_slope_s) / (variance + self._PRIOR_VARIANCE)
        return time_s - slope_s * (rows - 1), slope_s


def plan_depths(rates: Seq[float], limits: Seq[int], *, row_cost: float, depth_cost: float = 0.0) -> list[int]:
    """How many drafts to verify for each sequence, at most its limit, for the most tokens by time.

    rates: the chance of each sequence's draft to be right after right ones. row_cost: of one more row. depth_cost: of
    guessing one draft more for all sequences. Both as parts of a step of one row.
    """
    depths = [0] * len(rates)
    tokens, cost = float(len(rates)), 1 + row_cost * (len(rates) - 1)
    gains = {i: rate for i, rate in enumerate(rates) if limits[i] > 0}
    while gains:
        deeper_tokens, deeper_cost, taken = tokens, cost + depth_cost, []
        for i in sorted(gains, key=gains.__getitem__, reverse=True):
            if gains[i] * deeper_cost <= row_cost * deeper_tokens:
                break
            taken.append(i)
            deeper_tokens += gains[i]
            deeper_cost += row_cost
        if deeper_tokens * cost <= tokens * deeper_cost:
            break
        tokens, cost = deeper_tokens, deeper_cost
        for i in taken:
            depths[i] += 1
        gains = {i: gains[i] * rates[i] for i in taken if depths[i] < limits[i]}
    return depths
