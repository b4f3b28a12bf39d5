"""How many drafts a step is worth. Pure; times come in.

A draft that is right saves its sequence a step. Any draft is one more row of the step, which costs little where a step
waits for the weights to be read, and its share where it computes. So the likeliest drafts are added as long as that
raises what a step yields, tokens by time. With few sequences that allows unlikely drafts; with many only likely ones,
or none.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

_RECENT = 0.9  # weight of the past at each draft seen: about the last ten count
_UNLIKELY = 0.02  # a chance at which no draft can pay


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


class StepTimes:
    """What a step of decodes takes, by its rows: measured where it was tried lately, a line in between and beyond.

    Times are kept for classes of rows, each about a fifth wider than the one before. Beyond them every row is taken to
    add `ROW_SHARE` of the first, as where steps wait for the weights. Classes not tried for a while are forgotten, so
    that one slow moment does not keep drafts away for good.
    """

    ROW_SHARE = 0.1
    FORGOTTEN_AFTER = 500  # steps
    _BOUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 58, 70, 84, 101, 122, 147, 177, 213, 256)
    _PAST = 0.8  # weight of the past in a class's averages

    def __init__(self) -> None:
        self._num_steps = 0
        self._classes: dict[int, _RowClass] = {}

    def record(self, num_rows: int, duration_s: float) -> None:
        if duration_s <= 0:
            return  # a clock that does not move: nothing to learn
        self._num_steps += 1
        index = bisect_left(self._BOUNDS, num_rows)
        known = self._classes.get(index)
        if known is None:
            self._classes[index] = _RowClass(num_rows, duration_s, self._num_steps)
            return
        known.num_rows += (1 - self._PAST) * (num_rows - known.num_rows)
        known.duration_s += (1 - self._PAST) * (duration_s - known.duration_s)
        known.last_step = self._num_steps

    def predict(self, num_rows: int, max_drafts: int) -> list[float]:
        """Seconds of steps of num_rows .. num_rows + max_drafts rows; of no unit before anything was measured."""
        oldest = self._num_steps - self.FORGOTTEN_AFTER
        self._classes = {index: each for index, each in self._classes.items() if each.last_step > oldest}
        known = [self._classes[index] for index in sorted(self._classes)] or [_RowClass(1.0, 1.0, 0)]
        least, most = known[0], known[-1]
        slope_s = self.ROW_SHARE * least.duration_s / (1 + self.ROW_SHARE * (least.num_rows - 1))
        wanted = np.arange(num_rows, num_rows + max_drafts + 1)
        rows = [1.0, *(each.num_rows for each in known), most.num_rows + wanted[-1]]
        first_row_s = least.duration_s - slope_s * (least.num_rows - 1)
        times = [first_row_s, *(each.duration_s for each in known), most.duration_s + slope_s * wanted[-1]]
        predicted: list[float] = np.interp(wanted, rows, times).tolist()
        return predicted


@dataclass(slots=True)
class _RowClass:
    """Moving averages."""

    num_rows: float
    duration_s: float
    last_step: int


def plan_depths(rates: Seq[float], limits: Seq[int], step_s: Seq[float], depth_s: float = 0.0) -> list[int]:
    """How many drafts to verify for each sequence, at most its limit, for the most tokens by time.

    rates: the chance of each sequence's draft to be right after right ones. step_s[i]: seconds of a step with i drafts,
    for i up to the sum of `limits`. depth_s: seconds of guessing one draft more for all sequences.
    """
    likeliest = [(-rate, 1, i) for i, rate in enumerate(rates) if limits[i] > 0]  # of equal ones the shallowest
    heapq.heapify(likeliest)
    order: list[int] = []
    tokens, deepest = float(len(rates)), 0
    best, num_best = tokens / step_s[0], 0
    while likeliest:
        minus_gain, depth, i = heapq.heappop(likeliest)
        order.append(i)
        tokens, deepest = tokens - minus_gain, max(deepest, depth)
        if (value := tokens / (step_s[len(order)] + deepest * depth_s)) > best:
            best, num_best = value, len(order)
        if depth < limits[i] and -minus_gain * rates[i] >= _UNLIKELY:
            heapq.heappush(likeliest, (minus_gain * rates[i], depth + 1, i))
    return [order[:num_best].count(i) for i in range(len(rates))]
