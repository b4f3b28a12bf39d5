"""Metrics for what happens every token or step: plain numbers, since the client library's take a lock and, in caches
that a step has emptied, some 30 us.

Each is written by one thread, and read whenever a scrape comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class PlainCounter(Collector):
    """Reads as a `Counter` without labels."""

    def __init__(self, name: str, help_text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name = name
        self._help_text = help_text
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help_text, value=self.value)


class PlainHistogram(Collector):
    """Reads as a `Histogram` without labels. `bounds` ascend; beyond the last one there is another bucket."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._help_text = help_text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help_text, buckets=buckets, sum_value=self._sum)
