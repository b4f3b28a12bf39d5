"""What a pod measures of itself, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import generate_latest

from engine.batch import TokenEvent
from engine.sequence import FinishReason, SampledToken
from pod.metrics import PodMetrics
from proto.registry_pb2 import PodLoad


def event(reason: FinishReason | None) -> TokenEvent:
    return TokenEvent("a", SampledToken(1), reason, 0, 2, arrived_at=0, first_scheduled_at=0, at=0)


def test_gauges_and_counters() -> None:
    load = PodLoad(num_blocks=10, num_free_blocks=4, num_leases=1, num_credits=2, num_transfers=3, num_running=5)
    load.num_drafts, load.num_accepted = 8, 6
    metrics = PodMetrics(lambda: load)
    metrics.on_events([event(None), event(FinishReason.STOP)])
    metrics.step_s.observe(0.02)
    lines = generate_latest(metrics.registry).decode().splitlines()
    for line in (
        'pdserve_blocks{state="free"} 4.0',
        'pdserve_blocks{state="used"} 6.0',
        "pdserve_leases 1.0",
        "pdserve_credits 2.0",
        "pdserve_transfers 3.0",
        "pdserve_sequences_running 5.0",
        "pdserve_tokens_total 2.0",
        "pdserve_drafts_total 8.0",
        "pdserve_accepted_drafts_total 6.0",
        "pdserve_preemptions_total 2.0",
        'pdserve_sequences_finished_total{reason="stop"} 1.0',
        "pdserve_step_seconds_count 1.0",
    ):
        assert line in lines


def test_two_pods_of_one_process_do_not_share_counters() -> None:
    first, second = PodMetrics(PodLoad), PodMetrics(PodLoad)
    first.on_events([event(None)])
    assert second.registry.get_sample_value("pdserve_tokens_total") == 0
