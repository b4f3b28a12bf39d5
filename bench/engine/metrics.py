"""From the moments at which tokens arrived to what is reported; definitions as in every report of this project.

In seconds. TTFT: first token - sent. ITL: each gap between two tokens of a request. TPOT: (last - first) /
(tokens - 1), one value a request, undefined for one token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Timeline:
    """One request as its client saw it; moments on one monotonic clock."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)  # one for each message that brought tokens
    ended_at: float = 0.0  # when its last token, or its finish, arrived
    num_prompt_tokens: int = 0  # as the server counted them
    num_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def tpot(self) -> float | None:
        if self.num_tokens < 2:
            return None
        return (self.ended_at - self.token_times[0]) / (self.num_tokens - 1)

    def gaps(self, begin: float = -math.inf, end: float = math.inf) -> list[float]:
        """The gaps whose later token arrived within [begin, end)."""
        return [later - earlier for earlier, later in pairwise(self.token_times) if begin <= later < end]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of all values do not exceed. Raises ValueError for none."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def tokens_per_s(timelines: Sequence[Timeline]) -> float:
    """Output tokens of all by the time from the first request sent to the last token received."""
    begin, end = min(t.sent_at for t in timelines), max(t.ended_at for t in timelines)
    return sum(t.num_tokens for t in timelines) / (end - begin)


def median_tpot(timelines: Iterable[Timeline]) -> float:
    return statistics.median(tpot for t in timelines if (tpot := t.tpot) is not None)


def median_gap(timelines: Iterable[Timeline]) -> float:
    return statistics.median(gap for t in timelines for gap in t.gaps())


def summary(timelines: Sequence[Timeline]) -> dict[str, float]:
    """tok_s and the p50 and p99 of TTFT, TPOT and ITL, in ms."""
    gaps = [gap for t in timelines for gap in t.gaps()]
    series = {
        "ttft": [t.ttft for t in timelines],
        "tpot": [tpot for t in timelines if (tpot := t.tpot) is not None],
        "itl": gaps,
    }
    found = {
        f"{name}_p{share}_ms": percentile(values, share / 100) * 1e3
        for name, values in series.items()
        if values
        for share in (50, 99)
    }
    return {"tok_s": tokens_per_s(timelines), **found}
