"""What the router counts for every token, without the client library's own counters, reads as theirs would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.metrics import ITL_BUCKETS_S, RouterMetrics

GAPS_S = (0.0, 0.001, 0.002, 0.0021, 0.03, 0.1, 4.9, 5.0, 5.1, 100.0)


def lines(registry: CollectorRegistry, *families: str) -> list[str]:
    page = generate_latest(registry).decode().splitlines()
    wanted = [line for line in page if line.split()[-2 if line[0] != "#" else 2].startswith(families)]
    return sorted(line for line in wanted if "_created" not in line)


def test_gaps_and_tokens_are_told_as_by_the_client_library() -> None:
    metrics = RouterMetrics(list, lambda: ())  # type: ignore[arg-type,return-value]  # a snapshot of no pods
    plain = CollectorRegistry()
    histogram = Histogram(
        "pdserve_router_itl_seconds", "gap between token messages", buckets=ITL_BUCKETS_S, registry=plain
    )
    counter = Counter("pdserve_router_tokens", "tokens given to clients", registry=plain)
    for gap_s in GAPS_S:
        metrics.stream.gap(gap_s)
        histogram.observe(gap_s)
    metrics.stream.num_tokens += 12
    counter.inc(12)
    families = ("pdserve_router_itl_seconds", "pdserve_router_tokens")
    assert lines(metrics.registry, *families) == lines(plain, *families)
    assert len(lines(plain, *families)) == len(ITL_BUCKETS_S) + 1 + 2 + 2 + 3
