from __future__ import annotations

import pytest

from engine.sequence import SampledToken
from engine.speculation.verify import verified


@pytest.mark.parametrize(
    ("draft_ids", "drawn", "real"),
    [
        ((), [7], 1),
        ((7,), [7, 8], 2),
        ((6,), [7, 8], 1),
        ((7, 8, 9), [7, 8, 9, 10], 4),
        ((7, 5, 9), [7, 8, 9, 10], 2),
        ((5, 8, 9), [7, 8, 9, 10], 1),
    ],
)
def test_tokens_up_to_the_first_that_is_not_its_draft(draft_ids: tuple[int, ...], drawn: list[int], real: int) -> None:
    tokens = [SampledToken(token_id, logprob=-0.5) for token_id in drawn]
    assert verified(draft_ids, tokens) == tuple(tokens[:real])
