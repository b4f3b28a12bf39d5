"""Token times to TTFT, ITL, TPOT and percentiles, by hand."""

from __future__ import annotations

import random

import pytest

from bench.engine.metrics import Timeline, median_gap, median_tpot, percentile, summary, tokens_per_s

ONE = Timeline(sent_at=1.0, token_times=[1.5, 1.6, 1.8], ended_at=1.8, num_prompt_tokens=4, num_tokens=3)
TWO = Timeline(sent_at=1.0, token_times=[2.0, 2.5], ended_at=3.0, num_prompt_tokens=4, num_tokens=5)


def test_one_request() -> None:
    assert ONE.ttft == pytest.approx(0.5)
    assert ONE.gaps() == pytest.approx([0.1, 0.2])
    assert ONE.tpot == pytest.approx(0.15)


def test_tokens_that_came_together_are_one_gap_but_count_for_tpot() -> None:
    assert TWO.gaps() == [0.5]
    assert TWO.tpot == 0.25


def test_one_token_has_no_tpot() -> None:
    assert Timeline(0.0, [1.0], 1.0, 4, 1).tpot is None


def test_a_window_counts_the_gaps_that_end_in_it() -> None:
    assert ONE.gaps(1.6, 1.8) == pytest.approx([0.1])


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 5), (0.99, 10), (0.9, 9), (0.91, 10), (1.0, 10)])
def test_percentiles_are_values_that_occurred(share: float, expected: int) -> None:
    values = [float(v) for v in range(1, 11)]
    random.Random(0).shuffle(values)
    assert percentile(values, share) == expected


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_summary_of_several() -> None:
    assert tokens_per_s([ONE, TWO]) == 8 / 2.0
    assert median_tpot([ONE, TWO]) == pytest.approx(0.2)
    assert median_gap([ONE, TWO]) == pytest.approx(0.2)
    found = summary([ONE, TWO])
    assert found["tok_s"] == 4.0
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == pytest.approx((500, 1000))
    assert (found["itl_p50_ms"], found["itl_p99_ms"]) == pytest.approx((200, 500))
