"""The sampler: its formulas by hand, its distribution by chi-square, and that a draw depends on nothing but its row."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from engine.sampler import SampleRow, sample
from engine.sequence import SampledToken, SamplingParams

EOS = frozenset({3})
LOGITS = [1.0, 2.0, 0.5, 3.0, -1.0, 0.0]


def row(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**{"temperature": 0.0} | params), prompt, output)


def one(sample_row: SampleRow, logits: list[float] | None = None) -> SampledToken:
    return sample(torch.tensor([logits or LOGITS]), [sample_row], EOS)[0]


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    assert one(row()).token_id == 3
    assert one(row(), [0.0, 5.0, 5.0, 1.0]).token_id == 1


def test_no_logprobs_unless_asked() -> None:
    assert one(row()) == SampledToken(3)


def test_a_row_without_samples_is_no_error() -> None:
    assert sample(torch.empty(0, 6), [], EOS) == []


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"num_logprobs": 1}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_marked(number: float, params: dict[str, Any]) -> None:
    logits = torch.tensor([LOGITS, [number] * len(LOGITS)])
    good, bad = sample(logits, [row(**params), row(**params)], EOS)
    assert good.finite
    assert not bad.finite


def test_a_single_nan_is_found_where_logprobs_are_asked_for() -> None:
    assert not one(row(num_logprobs=1), [math.nan, *LOGITS[1:]]).finite


@pytest.mark.parametrize(
    ("sample_row", "expected"),
    [
        (row((3,), repetition_penalty=1.6), 1),  # 3 / 1.6 = 1.875 < 2
        (row((3,), repetition_penalty=1.4), 3),  # 3 / 1.4 = 2.14 > 2
        (row((), (3,), repetition_penalty=1.6), 1),
        (row((3,), (), presence_penalty=2.0), 3),  # prompt tokens do not count
        (row((), (3,), presence_penalty=1.5), 1),  # 3 - 1.5 < 2
        (row((), (3, 3), presence_penalty=0.9), 3),  # once, however often: 2.1 > 2
        (row((), (3,), frequency_penalty=0.9), 3),  # 2.1 > 2
        (row((), (3, 3), frequency_penalty=0.9), 1),  # 3 - 1.8 = 1.2 < 2
        (row((), (3, 3), frequency_penalty=0.3, presence_penalty=0.3), 3),  # 3 - 0.9 = 2.1
        (row(logit_bias={4: 4.5}), 4),  # -1 + 4.5
        (row(logit_bias={3: -1.5}), 1),
        (row(min_tokens=1), 1),  # end of text suppressed
        (row((), (0,), min_tokens=1), 3),
        (row(min_tokens=2, stop_token_ids=frozenset({1})), 0),
        (row(stop_token_ids=frozenset({3})), 3),
        (row(min_tokens=1, logit_bias={3: 100.0}), 1),  # bias lifts no ban
    ],
)
def test_formulas_by_hand(sample_row: SampleRow, expected: int) -> None:
    assert one(sample_row).token_id == expected


def test_repetition_multiplies_negative_logits() -> None:
    sampled = [one(row((0,), repetition_penalty=p), [-1.0, -1.5]).token_id for p in (1.4, 1.6)]
    assert sampled == [0, 1]


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    histories = torch.randint(0, 40, (50, 30), generator=torch.Generator().manual_seed(2))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(histories, logits.clone()).argmax(-1).tolist()
    rows = [row(tuple(h[:20]), tuple(h[20:]), repetition_penalty=1.7) for h in histories.tolist()]
    assert [s.token_id for s in sample(logits, rows, EOS)] == expected


def probabilities(temperature: float, kept: list[int]) -> dict[int, float]:
    weights = {token: math.exp(LOGITS[token] / temperature) for token in kept}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.6}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_k": 3}, [3, 1, 0]),
        ({"temperature": 1.0, "top_p": 0.7}, [3, 1]),  # 0.59, 0.22: the second crosses 0.7
        ({"temperature": 2.5, "top_p": 0.7}, [3, 1, 0]),  # 0.33, 0.22, 0.15: filters come after temperature
        ({"temperature": 1.0, "min_p": 0.1}, [3, 1, 0]),  # e^-2 = 0.135, e^-2.5 = 0.08
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.95, "min_p": 0.2}, [3, 1]),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any], kept: list[int]) -> None:
    """Chi-square over 4,000 seeds, at the 99.99 % quantile of 5 degrees of freedom."""
    count = 4000
    rows = [row(seed=seed, **params) for seed in range(count)]
    drawn = Counter(s.token_id for s in sample(torch.tensor([LOGITS] * count), rows, EOS))
    expected = probabilities(params["temperature"], kept)
    assert set(drawn) <= set(expected)
    assert sum((drawn[t] - count * p) ** 2 / (count * p) for t, p in expected.items()) < 25.7


def test_one_seed_draws_the_distribution_over_positions() -> None:
    count = 4000
    rows = [row((), (0,) * position, temperature=1.0, seed=11) for position in range(count)]
    drawn = Counter(s.token_id for s in sample(torch.tensor([LOGITS] * count), rows, EOS))
    expected = probabilities(1.0, list(range(6)))
    assert sum((drawn[t] - count * p) ** 2 / (count * p) for t, p in expected.items()) < 25.7


def test_a_draw_depends_on_its_own_row_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 1000, generator=generator) * 3
    variants: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {7: 3.0}, "num_logprobs": 2},
        {"temperature": 0.0},
        {"temperature": 1.5, "min_tokens": 9},
    ]
    rows = [row((i, 2 * i), tuple(range(i % 7)), seed=i * 977, **variants[i % 7]) for i in range(40)]
    alone = [sample(logits[i : i + 1], [rows[i]], EOS)[0] for i in range(40)]
    assert sample(logits, rows, EOS) == alone
    order = list(reversed(range(40)))
    assert sample(logits[order], [rows[i] for i in order], EOS) == [alone[i] for i in order]


def test_seed_and_position_change_the_draw() -> None:
    flat = torch.zeros(200, 5000)
    by_seed = {s.token_id for s in sample(flat, [row(temperature=1.0, seed=i) for i in range(200)], EOS)}
    by_position = {s.token_id for s in sample(flat, [row((), (0,) * i, temperature=1.0) for i in range(200)], EOS)}
    assert len(by_seed) > 190
    assert len(by_position) > 190


def test_logprobs_are_the_models_own_whatever_the_parameters() -> None:
    shaped = row((), (3,), presence_penalty=2.0, logit_bias={0: 9.0}, num_logprobs=2)
    sampled = one(shaped)
    total = math.log(sum(map(math.exp, LOGITS)))
    assert sampled.token_id == 0
    assert sampled.logprob == pytest.approx(1.0 - total, abs=1e-6)
    assert [t.token_id for t in sampled.top] == [3, 1]
    assert [t.logprob for t in sampled.top] == pytest.approx([3.0 - total, 2.0 - total], abs=1e-6)


def test_zero_logprobs_gives_the_chosen_tokens_only() -> None:
    sampled = one(row(num_logprobs=0))
    assert sampled.top == ()
    assert sampled.logprob is not None


def test_the_models_logits_are_left_as_they_are() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    kept = logits.clone()
    sample(logits, [row(temperature=0.5, top_k=2), row((3,), (3,), repetition_penalty=2.0, min_tokens=3)], EOS)
    torch.testing.assert_close(logits, kept, atol=0, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-320},
        {"temperature": 1e-5},
        {"temperature": 1e308, "min_tokens": 1},
        {"temperature": 1.0, "repetition_penalty": 1e-320},
        {"temperature": 1.0, "repetition_penalty": 1e308},
        {"temperature": 1e-5, "logit_bias": {0: 100.0}, "top_p": 1e-320, "min_p": 1.0},
        {"temperature": 1.0, "top_k": 2**31 - 1, "seed": 2**64 - 1},
    ],
)
def test_extreme_parameters_still_give_a_token(params: dict[str, Any]) -> None:
    sampled = one(row((0, 1, 2, 3, 4, 5), (5,), **params))
    assert 0 <= sampled.token_id < len(LOGITS)
