"""What the router measures of itself, in a Prometheus registry of its own."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from proto.counters import PlainCounter, PlainHistogram
from router.ledger import Ledger
from router.snapshot import PREFILL, Snapshot

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0, 5.0)


class _StateCollector(Collector):
    """Gauges read from the router when it is scraped."""

    def __init__(self, states: Callable[[], Iterable[str]], snapshot: Callable[[], Snapshot]) -> None:
        self._states = states
        self._snapshot = snapshot

    def collect(self) -> Iterator[GaugeMetricFamily]:
        requests = GaugeMetricFamily("pdserve_router_in_flight", "requests by state", labels=["state"])
        for state, count in sorted(Count(self._states()).items()):
            requests.add_metric([state], count)
        yield requests
        pods = GaugeMetricFamily("pdserve_router_pods", "pods by role and state", labels=["role", "state"])
        seen = Count(
            (
                "prefill" if pod.role == PREFILL else "decode",
                "draining" if pod.draining else "ready" if pod.reachable else "unreachable",
            )
            for pod in self._snapshot()
        )
        for labels, count in sorted(seen.items()):
            pods.add_metric(list(labels), count)
        yield pods


class RouterMetrics:
    def __init__(self, states: Callable[[], Iterable[str]], snapshot: Callable[[], Snapshot]) -> None:
        """`states` yields each live request's state."""
        self.registry = CollectorRegistry()
        self.registry.register(_StateCollector(states, snapshot))
        self.requests = Counter("pdserve_router_requests", "ended, by outcome", ["outcome"], registry=self.registry)
        self.attempts = Counter("pdserve_router_attempts", "by how they ended", ["ended"], registry=self.registry)
        self.ttft_s = Histogram(
            "pdserve_router_ttft_seconds",
            "arrival to first token",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.tokens = PlainCounter("pdserve_router_tokens", "tokens given to clients", self.registry)
        self.itl_s = PlainHistogram(
            "pdserve_router_itl_seconds", "gap between token messages", ITL_BUCKETS_S, self.registry
        )

    def ended(self, outcome: str, ledger: Ledger) -> None:
        self.requests.labels(outcome).inc()
        if ledger.num_attempts:
            self.attempts.labels("last").inc()
            self.attempts.labels("replayed").inc(ledger.num_attempts - 1)
        if ledger.ttft_s > 0:
            self.ttft_s.observe(ledger.ttft_s)
