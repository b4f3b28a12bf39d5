from __future__ import annotations

import itertools

import pytest

from engine.speculation.policy import Acceptance, StepTimes, plan_depths


def test_acceptance_follows_what_is_seen_and_stops_at_a_wrong_draft() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == 0.5
    acceptance.see((1, 2, 3), (1, 9, 3))
    assert acceptance.rate == pytest.approx((0.81 * 1 + 0.9) / (0.81 * 2 + 1.9))
    acceptance.see((1,), ())
    acceptance.see((), (1,))
    assert acceptance.rate == pytest.approx((0.81 * 1 + 0.9) / (0.81 * 2 + 1.9))
    for _ in range(60):
        acceptance.see((1,), (1, 2))
    assert acceptance.rate == pytest.approx(1, abs=0.01)
    for _ in range(60):
        acceptance.see((1,), (2,))
    assert acceptance.rate == pytest.approx(0, abs=0.01)


def test_before_any_measurement_rows_add_their_share() -> None:
    times = StepTimes()
    assert times.predict(1, 2) == pytest.approx([1.0, 1.1, 1.2])
    times.record(3, 0.0)
    assert times.predict(3, 1) == pytest.approx([1.2, 1.3])


def test_what_was_measured_holds_and_a_line_lies_between() -> None:
    times = StepTimes()
    for rows in (1, 4, 8):
        times.record(rows, {1: 0.02, 4: 0.026, 8: 0.05}[rows])
    assert times.predict(1, 7) == pytest.approx([0.02, 0.022, 0.024, 0.026, 0.032, 0.038, 0.044, 0.05])
    assert times.predict(8, 2) == pytest.approx([0.05, 0.052, 0.054])
    assert times.predict(300, 0)[0] == pytest.approx(0.05 + 292 * 0.002)


def test_one_class_alone_stands_for_the_others() -> None:
    times = StepTimes()
    for _ in range(50):
        times.record(11, 0.04)
    assert times.predict(1, 0)[0] == pytest.approx(0.02)
    assert times.predict(11, 10) == pytest.approx([0.04 + 0.002 * i for i in range(11)])


def test_averages_move_and_old_ones_are_forgotten() -> None:
    times = StepTimes()
    times.record(2, 9.0)
    for _ in range(40):
        times.record(1, 0.02)
    assert times.predict(2, 0)[0] == pytest.approx(9.0)
    for _ in range(StepTimes.FORGOTTEN_AFTER):
        times.record(1, 0.03)
    assert times.predict(1, 1) == pytest.approx([0.03, 0.033])


def line(row_share: float, count: int) -> list[float]:
    return [1 + row_share * i for i in range(count)]


def yield_of(depths: list[int], rates: list[float], step_s: list[float], depth_s: float) -> float:
    """Expected tokens of a step, by its time."""
    tokens = sum(sum(rate**i for i in range(depth + 1)) for rate, depth in zip(rates, depths, strict=True))
    return tokens / (step_s[sum(depths)] + depth_s * max(depths))


STEPS = {
    "rows next to free": line(0.01, 10),
    "bound by weights": line(0.07, 10),
    "bound by arithmetic": line(1.0, 10),
    "a stair": [1.0, 1.05, 1.1, 1.15, 2.0, 2.05, 2.1, 2.15, 2.2, 2.25],
}


@pytest.mark.parametrize("depth_s", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("rates", [[0.9], [0.05], [0.8, 0.2], [0.95, 0.6, 0.6], [1.0, 1.0], [0.0]])
def test_plans_are_close_to_the_best_there_is(rates: list[float], name: str, depth_s: float) -> None:
    plan = plan_depths(rates, [3] * len(rates), STEPS[name], depth_s)
    every = itertools.product(range(4), repeat=len(rates))
    best = max(yield_of(list(depths), rates, STEPS[name], depth_s) for depths in every)
    assert yield_of(plan, rates, STEPS[name], depth_s) >= 0.9 * best
    assert yield_of(plan, rates, STEPS[name], depth_s) >= yield_of([0] * len(rates), rates, STEPS[name], depth_s)


def test_limits_hold_and_depths_shrink_with_the_batch() -> None:
    assert plan_depths([1.0, 1.0, 1.0], [0, 2, 8], line(0.05, 11)) == [0, 2, 8]
    assert plan_depths([], [], [1.0]) == []
    by_batch = [
        max(plan_depths([0.6] * n, [8] * n, [1 + 0.07 * (n - 1 + i) for i in range(8 * n + 1)])) for n in (1, 4, 16, 64)
    ]
    assert by_batch == [4, 2, 1, 0]
