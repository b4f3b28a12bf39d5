"""What a pod measures of itself, in a Prometheus registry of its own (several pods may share a process in tests)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.batch import TokenEvent
from proto.counters import PlainCounter, PlainHistogram
from proto.registry_pb2 import PodLoad

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class _LoadCollector(Collector):
    """Gauges, and counters of the engine, read from the pod when it is scraped."""

    def __init__(self, load: Callable[[], PodLoad]) -> None:
        self._load = load

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        load = self._load()
        blocks = GaugeMetricFamily("pdserve_blocks", "KV blocks by state (free includes evictable)", labels=["state"])
        blocks.add_metric(["free"], load.num_free_blocks)
        blocks.add_metric(["used"], load.num_blocks - load.num_free_blocks)
        yield blocks
        for name, help_text, value in (
            ("sequences_waiting", "sequences not yet scheduled", load.num_waiting),
            ("sequences_running", "sequences being computed", load.num_running),
            ("waiting_tokens", "prompt tokens still to compute", load.num_waiting_tokens),
            ("leases", "hand-offs pinned for a decode pod", load.num_leases),
            ("credits", "reserved blocks that wait for a hand-off", load.num_credits),
            ("transfers", "KV transfers waiting or in flight", load.num_transfers),
        ):
            yield GaugeMetricFamily(f"pdserve_{name}", help_text, value=value)
        for name, help_text, value in (
            ("drafts", "tokens guessed and verified", load.num_drafts),
            ("accepted_drafts", "of these, the right ones", load.num_accepted),
        ):
            yield CounterMetricFamily(f"pdserve_{name}", help_text, value=value)


class PodMetrics:
    """Counters and histograms; `load` is asked for the gauges at each scrape."""

    def __init__(self, load: Callable[[], PodLoad]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(load))
        self.step_s = PlainHistogram("pdserve_step_seconds", "engine step", STEP_BUCKETS_S, self.registry)
        self.transfer_s = Histogram(
            "pdserve_transfer_seconds", "one hand-off's transfer", buckets=TRANSFER_BUCKETS_S, registry=self.registry
        )
        self.transfer_bytes = Counter("pdserve_transfer_bytes", "KV bytes pulled", registry=self.registry)
        self.failed = Counter("pdserve_sequences_failed", "by error", ["error"], registry=self.registry)
        self.tokens = PlainCounter("pdserve_tokens", "sampled tokens", self.registry)
        self.cached_tokens = Counter("pdserve_cached_tokens", "prompt tokens found in cache", registry=self.registry)
        self.finished = Counter("pdserve_sequences_finished", "by reason", ["reason"], registry=self.registry)
        self.preemptions = Counter("pdserve_preemptions", "preempted sequences", registry=self.registry)
        self.leases_expired = Counter("pdserve_leases_expired", "leases nobody renewed", registry=self.registry)
        self.credits_expired = Counter("pdserve_credits_expired", "credits nobody used", registry=self.registry)
        self.invariant_violations = Counter(
            "pdserve_invariant_violations", "failed self-checks", registry=self.registry
        )

    def on_events(self, events: list[TokenEvent]) -> None:
        self.tokens.value += len(events)
        for event in events:
            if event.finish_reason is not None:
                self.finished.labels(event.finish_reason.value).inc()
                self.preemptions.inc(event.num_preemptions)
