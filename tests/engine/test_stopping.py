from __future__ import annotations

import pytest

from engine.sequence import FinishReason, SamplingParams
from engine.stopping import finish_reason, suppressed_ids

PARAMS = SamplingParams(stop_token_ids=frozenset({5, 9}), max_tokens=4, min_tokens=2)


@pytest.mark.parametrize(
    ("token_id", "num_prompt", "num_output", "expected"),
    [
        (1, 10, 1, None),
        (1, 10, 3, None),
        (1, 10, 4, FinishReason.LENGTH),  # max_tokens
        (5, 10, 3, FinishReason.STOP),
        (9, 10, 4, FinishReason.STOP),  # a stop id beats the limit it meets
        (5, 10, 2, None),  # within min_tokens nothing stops
        (1, 17, 3, FinishReason.LENGTH),  # the context is full
        (5, 17, 3, FinishReason.STOP),
    ],
)
def test_finish_reason(token_id: int, num_prompt: int, num_output: int, expected: FinishReason | None) -> None:
    reason = finish_reason(PARAMS, token_id, num_prompt=num_prompt, num_output=num_output, max_model_len=20)
    assert reason is expected


def test_ids_that_end_the_answer_are_suppressed_before_min_tokens_only() -> None:
    eos = frozenset({511})
    assert suppressed_ids(PARAMS, 0, eos) == {5, 9, 511}
    assert suppressed_ids(PARAMS, 1, eos) == {5, 9, 511}
    assert suppressed_ids(PARAMS, 2, eos) == frozenset()
