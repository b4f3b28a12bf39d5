"""What is counted without the client library reads as if it had counted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from proto.counters import PlainCounter, PlainHistogram

BOUNDS_S = (0.002, 0.03, 0.1, 1.0, 5.0)
VALUES_S = (0.0, 0.001, 0.002, 0.0021, 0.03, 0.1, 4.9, 5.0, 5.1, 100.0)


def lines(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


def test_they_read_as_those_of_the_client_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain_s = PlainHistogram("gap_seconds", "gap between messages", BOUNDS_S, ours)
    histogram = Histogram("gap_seconds", "gap between messages", buckets=BOUNDS_S, registry=theirs)
    plain, counter = PlainCounter("tokens", "tokens given", ours), Counter("tokens", "tokens given", registry=theirs)
    for value_s in VALUES_S:
        plain_s.observe(value_s)
        histogram.observe(value_s)
    plain.value += 12
    counter.inc(12)
    assert lines(ours) == lines(theirs)
    assert len(lines(ours)) == 2 + len(BOUNDS_S) + 1 + 2 + 2 + 1
