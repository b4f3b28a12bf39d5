from __future__ import annotations

import pytest
import torch

from kernels import sampling


def test_filters_equal_the_reference() -> None:
    logits = torch.randn(8, 300) * 3
    logits[:4] = logits[:4].round()  # ties, zeros of both signs among them
    logits[4, 50:] = -torch.inf
    expected = logits.clone()
    arguments = (
        [5, 0, 40, 0, 60, 1, 400, 0],
        [1.0, 0.7, 0.6, 0.3, 0.9, 0.5, 0.999, 1.0],
        [0.0, 0.1, 0.0, 0, 0, 0, 0, 0.5],
    )
    sampling.filter_logits(logits, *arguments, backend="triton")
    sampling.filter_logits(expected, *arguments, backend="reference")
    assert torch.equal(logits, expected)


def test_filters_and_draw_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton import sampling as triton_sampling

    monkeypatch.setattr(triton_sampling, "_MAX_BLOCK", 32)
    logits = torch.randn(1, 100).round()
    expected = logits.clone()
    sampling.filter_logits(logits, [60], [0.9], [0.0], backend="triton")
    sampling.filter_logits(expected, [60], [0.9], [0.0], backend="reference")
    assert torch.equal(logits, expected)

    weights = torch.tensor([0.0, 0.25, 1.0, 3.0]).repeat(6, 20)[:, :70]
    numbers = [0.0, 0.1, 0.4, 0.77, 0.999, 1.0 - 2.0**-53]
    drawn = sampling.draw(weights, numbers, backend="triton")
    assert torch.equal(drawn, sampling.draw(weights, numbers, backend="reference"))
