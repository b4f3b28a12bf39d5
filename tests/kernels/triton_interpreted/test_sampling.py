from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.sampling import draw, filter_logits
from kernels.triton import sampling as implementation


@given(data=st.data())
def test_filters_equal_the_reference(data: st.DataObject) -> None:
    """Which is one stable sort in float64. Ties, zeros of both signs and impossible tokens among the logits."""
    vocab_size = data.draw(st.one_of(st.integers(1, 40), st.just(300)), label="vocab_size")
    rows = data.draw(st.integers(1, 3), label="rows")
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    logits = torch.randn(rows, vocab_size + 3)[:, :vocab_size] * data.draw(st.sampled_from([0.01, 3.0]), label="size")
    if data.draw(st.booleans(), label="ties"):
        logits = logits.round()
    logits[:, data.draw(st.integers(1, vocab_size), label="possible") :] = -torch.inf
    expected = logits.clone()

    def of_rows(numbers: list[float]) -> list[float]:
        return data.draw(st.lists(st.sampled_from(numbers), min_size=rows, max_size=rows))

    top_k = [int(k) for k in of_rows([0, 1, 5, 60, 400])]
    arguments = (top_k, of_rows([1.0, 0.3, 0.7, 0.999]), of_rows([0.0, 0.1, 0.5]))
    filter_logits(logits, *arguments, backend="triton")
    filter_logits(expected, *arguments, backend="reference")
    assert torch.equal(logits, expected)


def test_filters_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_MAX_BLOCK", 32)
    torch.manual_seed(0)
    logits = torch.randn(1, 100).round()
    expected = logits.clone()
    filter_logits(logits, [60], [0.9], [0.0], backend="triton")
    filter_logits(expected, [60], [0.9], [0.0], backend="reference")
    assert torch.equal(logits, expected)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=70).filter(any),
    numbers=st.lists(
        st.one_of(st.sampled_from([0.0, 0.5, 1.0 - 2.0**-53]), st.floats(0, 1, exclude_max=True)), max_size=4
    ),
)
@example(weights=[0.0, 1.0, 0.0, 3.0, 0.0], numbers=[0.0, 0.25, 0.999])  # the first and second target end a token
@example(weights=[0.25] * 70, numbers=[0.1, 0.5, 0.9])
def test_draw_equals_the_reference(weights: list[float], numbers: list[float]) -> None:
    """All sums of these weights are exact. The draw walks blocks of 32 tokens."""
    probs = torch.tensor([weights]).repeat(len(numbers), 2)[:, : len(weights)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "_MAX_BLOCK", 32)
        drawn = draw(probs, numbers, backend="triton")
    assert torch.equal(drawn, draw(probs, numbers, backend="reference"))


def test_rounding_at_the_end_draws_the_last_possible_token() -> None:
    """The total, summed in another order than the cumulative sums, may round upwards: no token is beyond the target."""
    generator = torch.Generator().manual_seed(0)
    uniform = 1.0 - 2.0**-53
    drawn = (
        (torch.randn(64, generator=generator) * 9).index_fill(0, torch.tensor(63), -torch.inf) for _ in range(1000)
    )
    rows = (logits.softmax(0) for logits in drawn)  # as wide as the kernel's block, whose sums are NumPy's
    probs = next(row for row in rows if uniform * (wide := row.double().numpy()).sum() >= wide.cumsum()[-1])
    assert int(draw(probs[None], [uniform], backend="triton")) == 62
