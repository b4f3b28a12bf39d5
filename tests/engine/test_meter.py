from __future__ import annotations

import pytest

from engine.batch import Batch, ScheduledSequence
from engine.meter import StepMeter
from engine.sequence import SamplingParams


def batch(*num_tokens: int) -> Batch:
    return Batch(
        tuple(
            ScheduledSequence("s", (0,) * count, 0, (0,), True, SamplingParams(), prompt_ids=(), output_ids=())
            for count in num_tokens
        )
    )


def test_nothing_measured_is_zero() -> None:
    assert (StepMeter().step_s, StepMeter().prefill_tokens_per_s) == (0.0, 0.0)


def test_averages_move_towards_what_is_measured() -> None:
    meter = StepMeter()
    meter.record(batch(100), 0.1)
    assert meter.step_s == 0.1
    assert meter.prefill_tokens_per_s == pytest.approx(1000)
    for _ in range(100):
        meter.record(batch(100, 1), 0.2)
    assert meter.step_s == pytest.approx(0.2, rel=0.01)
    assert meter.prefill_tokens_per_s == pytest.approx(500, rel=0.01)


def test_decode_steps_leave_the_prefill_rate_alone() -> None:
    meter = StepMeter()
    meter.record(batch(50, 50), 0.1)
    meter.record(batch(1, 1, 1), 0.01)
    assert meter.prefill_tokens_per_s == pytest.approx(1000)
    assert 0.01 < meter.step_s < 0.1
