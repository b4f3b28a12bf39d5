from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import (
    Draws,
    add_bias,
    apply_penalties,
    ban,
    draw,
    filter_logits,
    greedy,
    prepared_greedy,
    prepared_sample,
    sample,
)
from tests.kernels.backends import every_backend, using

VOCAB = 40

# Few distinct values, so that ties abound; some tokens are banned.
coarse_rows = st.lists(
    st.sampled_from([-math.inf, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0]), min_size=VOCAB, max_size=VOCAB
).filter(lambda row: max(row) > -math.inf)
fine_rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def survivors(row: list[float], top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """The filters token by token, and how close a decision about probability came to going the other way."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[: top_k or len(row)]
    weights = [math.exp(row[token] - row[order[0]]) for token in order]
    total = math.fsum(weights)
    kept, margin = set(), math.inf
    for rank, token in enumerate(order):
        before = math.fsum(weights[:rank]) / total
        nucleus = top_p == 1.0 or rank == 0 or before < top_p
        likely = min_p == 0.0 or rank == 0 or weights[rank] >= min_p
        if top_p < 1.0 and rank > 0:
            margin = min(margin, abs(before - top_p))
        if min_p > 0.0 and rank > 0:
            margin = min(margin, abs(weights[rank] - min_p))
        if nucleus and likely:
            kept.add(token)
    return kept, margin


@given(
    row=st.one_of(coarse_rows, fine_rows),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)
@settings(max_examples=150, deadline=None)
def test_filters_keep_what_their_definition_keeps(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    expected, margin = survivors(row, top_k, top_p, min_p)
    logits = torch.tensor([row, row])
    before = logits.clone()
    filter_logits(logits, [top_k, 0], [top_p, 1.0], [min_p, 0.0])
    assert torch.equal(logits[1], before[1])
    kept = {token for token in range(VOCAB) if logits[0, token] > -math.inf}
    if margin > 1e-9:
        assert kept == {token for token in expected if row[token] > -math.inf}
    assert all(logits[0, token] == before[0, token] for token in kept)
    assert greedy(before[:1])[0] in kept


def drawn_by_definition(
    row: list[float], temperature: float, filters: tuple[int, float, float], number: float
) -> tuple[int, float]:
    """The token, and how close any decision came to going the other way."""
    scaled = [float(np.float32(logit) / np.float32(temperature)) for logit in row]
    kept, margin = survivors(scaled, *filters)
    weights = [math.exp(scaled[token] - max(scaled)) for token in sorted(kept)]
    cumulative = np.cumsum(weights) / sum(weights)
    rank = int(np.searchsorted(cumulative, number, side="right"))
    margin = min(margin, *np.abs(cumulative[:-1] - number), math.inf)
    return sorted(kept)[min(rank, len(kept) - 1)], margin


@every_backend
@given(
    row=st.one_of(coarse_rows, fine_rows),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
    number=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=150, deadline=None)
def test_sample_draws_by_its_definition(
    implementation: str, row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, number: float
) -> None:
    expected, margin = drawn_by_definition(row, temperature, (top_k, top_p, min_p), number)
    logits = torch.tensor([row, row])
    before = logits.clone()
    with using(implementation) as backend:
        draws = Draws([temperature, 1.0], [top_k, 1], [top_p, 1.0], [min_p, 0.0], [number, 0.5])
        tokens = sample(logits, draws, backend=backend)
        first = greedy(logits, backend=backend)
    assert torch.equal(logits, before)
    assert tokens[1] == first[0] == max(range(VOCAB), key=lambda token: (row[token], -token))
    if margin > 1e-6:
        assert tokens[0] == expected


@every_backend
@pytest.mark.parametrize(
    "filters", [(0, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.01), (5000, 1.0, 0.0), (50, 0.95, 0.0), (0, 1.0, 1e-4)]
)
@pytest.mark.parametrize("spread", [0.001, 1.0, 8.0])
def test_sample_from_a_large_vocabulary(implementation: str, filters: tuple[int, float, float], spread: float) -> None:
    logits = torch.randn(8, 49_151, generator=torch.Generator().manual_seed(1)) * spread
    numbers = [0.0, 0.1, 0.37, 0.5, 0.77, 0.9, 0.999, 1 - 2**-53]
    draws = Draws([0.8] * 8, [filters[0]] * 8, [filters[1]] * 8, [filters[2]] * 8, numbers)
    expected = sample(logits, draws, backend="reference")
    with using(implementation) as backend:
        actual = sample(logits, draws, backend=backend)
    # A sum of tens of thousands of nearly equal probabilities may round to its neighbour's side.
    assert np.abs(np.subtract(actual, expected)).max() <= (2 if spread < 1 else 0)


@every_backend
def test_bfloat16_is_drawn_from_as_its_float32(implementation: str) -> None:
    logits = torch.randn(8, 1003, generator=torch.Generator().manual_seed(2)).bfloat16()  # with many ties
    logits[0] = -math.inf
    logits[1] = math.nan
    top_k, top_p, min_p = [0, 0, 0, 7, 0, 50, 1, 0], [1.0, 1.0, 0.9] * 2 + [1.0, 1.0], [0.0] * 7 + [0.1]
    draws = Draws([0.8] * 8, top_k, top_p, min_p, [0.3] * 8)
    with using(implementation) as backend:
        assert sample(logits, draws, backend=backend) == sample(logits.float(), draws, backend=backend)
        assert greedy(logits, backend=backend) == greedy(logits.float(), backend=backend)


@every_backend
def test_what_is_prepared_looks_at_what_the_memory_then_holds(implementation: str) -> None:
    logits = torch.zeros(2, 1003)
    with using(implementation) as backend:
        choose, draw_from = prepared_greedy(logits, backend=backend), prepared_sample(logits, backend=backend)
        for favourite in (0, 1002, 17):
            logits.zero_()[0, favourite] = 100.0
            assert choose() == [favourite, 0]
            assert draw_from(Draws([1.0, 1.0], [0, 1], [1.0, 1.0], [0.0, 0.0], [0.9, 0.9])) == [favourite, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_refuses_other_logits(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"expected torch\.float32 or torch\.bfloat16"):
        greedy(torch.zeros(1, 5, dtype=dtype))


@every_backend
def test_sample_survives_extreme_parameters(implementation: str) -> None:
    """Logits that the temperature makes infinite, infinite ones, and ones that are no numbers."""
    logits = torch.tensor([[1.0, 3e38, -3e38], [1.0, math.inf, 2.0], [math.nan, 1.0, -math.inf]])
    with using(implementation) as backend:
        tokens = sample(logits, Draws([1e-5] * 3, [0, 0, 2], [1.0, 0.5, 0.9], [0.0] * 3, [0.9] * 3), backend=backend)
    assert tokens == [1, 1, 1]


def test_many_ties_at_the_cut_keep_the_lowest_ids() -> None:
    logits = torch.zeros(1, 5000)
    filter_logits(logits, [1500], [1.0], [0.0])
    assert logits.isfinite()[0].nonzero().squeeze(1).tolist() == list(range(1500))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1], [1.0], [0.0]), r"top_k is \[-1\], expected numbers >= 0"),
        (([0], [0.0], [0.0]), r"top_p is \[0.0\], expected numbers in \(0, 1\]"),
        (([0], [1.1], [0.0]), "top_p is"),
        (([0], [math.nan], [0.0]), "top_p is"),
        (([0], [1.0], [-0.1]), r"min_p is \[-0.1\], expected numbers in \[0, 1\]"),
        (([0, 0], [1.0], [0.0]), "got 2 entries for 1 rows of logits"),
    ],
)
def test_parameters_outside_their_ranges_are_named(
    arguments: tuple[list[int], list[float], list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        filter_logits(torch.zeros(1, 5), *arguments)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 49_152)
    logits[0, [40_000, 12, 31_000]] = 1.0
    assert greedy(logits) == [12, 0]


@given(
    row=fine_rows,
    prompt=token_ids,
    output=token_ids,
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, -1.5, 0.7]),
    frequency=st.sampled_from([0.0, -0.3, 2.0]),
)
@settings(deadline=None)
def test_penalties_equal_their_definition(
    row: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    expected = []
    for token, logit in enumerate(row):
        seen = token in prompt or token in output
        value = logit if not seen else logit / repetition if logit > 0 else logit * repetition
        expected.append(value - presence * (token in output) - frequency * output.count(token))
    logits = torch.tensor([[1.0] * VOCAB, row])
    apply_penalties(logits, [[], prompt], [[], output], [1.0, repetition], [0.0, presence], [0.0, frequency])
    assert logits[0].eq(1.0).all()
    torch.testing.assert_close(logits[1].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_bias_and_bans() -> None:
    logits = torch.arange(6.0).reshape(2, 3)
    add_bias(logits, [{0: 10.0, 2: -1.0}, {}])
    ban(logits, [[], {1, 2}])
    assert logits.tolist() == [[10.0, 1.0, 1.0], [3.0, -math.inf, -math.inf]]


@pytest.mark.parametrize("token", [-1, 3])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    logits = torch.zeros(1, 3)
    refused = pytest.raises(IndexError, match=rf"token ids {token} .. {token} leave the vocabulary 0 .. 2")
    with refused:
        add_bias(logits, [{token: 1.0}])
    with refused:
        ban(logits, [[token]])
    with refused:
        apply_penalties(logits, [[token]], [[]], [2.0], [0.0], [0.0])
    assert logits.eq(0).all()


@given(
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=30).filter(any),
    number=st.one_of(st.sampled_from([0.0, 0.5, 1.0 - 2.0**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_draw_inverts_the_cumulative_sum(weights: list[float], number: float) -> None:
    token = int(draw(torch.tensor([weights]), [number]))
    assert weights[token] > 0
    target = number * sum(weights)  # all sums of these weights are exact
    assert sum(weights[:token]) <= target
    assert sum(weights[: token + 1]) > target or token == max(i for i, w in enumerate(weights) if w)


def test_draw_follows_the_probabilities() -> None:
    probs = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    drawn = [int(draw(probs, [(i + 0.5) / 1000])) for i in range(1000)]
    assert [drawn.count(token) for token in range(4)] == [100, 0, 600, 300]


@pytest.mark.parametrize("number", [-0.1, 1.0, math.nan])
def test_uniforms_outside_the_unit_interval_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="uniforms"):
        draw(torch.ones(1, 3), [number])
