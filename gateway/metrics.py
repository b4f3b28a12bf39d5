"""What the gateway counts, in Prometheus' form. Each app has a registry of its own, so tests do not share counters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class TokenCollector(Collector):
    """Tokens by endpoint. Plain numbers, written on the event loop alone, as the router's (`StreamCollector`)."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        tokens = CounterMetricFamily("pdserve_gateway_completion_tokens", "Tokens sent to clients", labels=["endpoint"])
        for endpoint, count in self.counts.items():
            tokens.add_metric([endpoint], count)
        yield tokens


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "pdserve_gateway_requests",
            "Generation requests by endpoint and final HTTP status; 499: the client left",
            ["endpoint", "status"],
            registry=self._registry,
        )
        self.running = Gauge(
            "pdserve_gateway_running_requests",
            "Generation requests being answered",
            ["endpoint"],
            registry=self._registry,
        )
        self.ttft = Histogram(
            "pdserve_gateway_ttft_seconds",
            "From a request's body to its first token",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.duration = Histogram(
            "pdserve_gateway_request_seconds",
            "From a request's arrival to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = TokenCollector()
        self._registry.register(self.tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)
