from __future__ import annotations

import itertools
import random

import pytest

from engine.speculation.policy import Acceptance, StepCost, plan_depths


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


def test_no_measurement_means_the_prior() -> None:
    cost = StepCost()
    assert (cost.first_row_s, cost.row_cost) == (0.0, StepCost.PRIOR_ROW_COST)
    cost.record(3, 0.0)
    assert cost.row_cost == StepCost.PRIOR_ROW_COST


def test_constant_batches_keep_the_prior() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.record(4, 0.026)
    assert cost.row_cost == pytest.approx(StepCost.PRIOR_ROW_COST)
    assert cost.first_row_s == pytest.approx(0.02)


@pytest.mark.parametrize("row_cost", [0.02, 0.07, 0.4])
def test_a_line_is_found_through_noise(row_cost: float) -> None:
    cost, rng = StepCost(), random.Random(1)
    for _ in range(300):
        rows = rng.randint(1, 9)
        cost.record(rows, 0.02 * (1 + row_cost * (rows - 1)) * rng.uniform(0.9, 1.1))
    assert cost.row_cost == pytest.approx(row_cost, rel=0.25)
    assert cost.first_row_s == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize(("slope", "row_cost"), [(-0.5, 0.005), (0.0, 0.005), (5.0, 1.0)])
def test_a_row_is_never_free_nor_dearer_than_a_step(slope: float, row_cost: float) -> None:
    cost = StepCost()
    for rows in itertools.islice(itertools.cycle([1, 4]), 200):
        cost.record(rows, 0.02 * (1 + slope * (rows - 1) / 3))
    assert cost.row_cost == pytest.approx(row_cost, abs=0.02)


def yield_of(depths: list[int], rates: list[float], row_cost: float, depth_cost: float) -> float:
    """Expected tokens of a step, by its time."""
    tokens = sum(sum(rate**i for i in range(depth + 1)) for rate, depth in zip(rates, depths, strict=True))
    cost = 1 + row_cost * (len(rates) - 1 + sum(depths)) + depth_cost * max(depths)
    return tokens / cost


@pytest.mark.parametrize("depth_cost", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("row_cost", [0.01, 0.07, 0.3, 1.0])
@pytest.mark.parametrize("rates", [[0.9], [0.05], [0.8, 0.2], [0.95, 0.6, 0.6], [1.0, 1.0], [0.0]])
def test_plans_are_close_to_the_best_there_is(rates: list[float], row_cost: float, depth_cost: float) -> None:
    plan = plan_depths(rates, [3] * len(rates), row_cost=row_cost, depth_cost=depth_cost)
    every = itertools.product(range(4), repeat=len(rates))
    best = max(yield_of(list(depths), rates, row_cost, depth_cost) for depths in every)
    assert yield_of(plan, rates, row_cost, depth_cost) >= 0.95 * best
    assert yield_of(plan, rates, row_cost, depth_cost) >= yield_of([0] * len(rates), rates, row_cost, depth_cost)


def test_limits_hold_and_depths_shrink_with_the_batch() -> None:
    assert plan_depths([1.0, 1.0, 1.0], [0, 2, 8], row_cost=0.05) == [0, 2, 8]
    assert plan_depths([], [], row_cost=0.1) == []
    by_batch = [max(plan_depths([0.6] * size, [8] * size, row_cost=0.07)) for size in (1, 4, 16, 64)]
    assert by_batch == [4, 2, 1, 0]
