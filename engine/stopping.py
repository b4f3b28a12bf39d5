"""When an answer ends, and what may not end it yet: one rule for every path and every token, the first included."""

from __future__ import annotations

from engine.sequence import FinishReason, SamplingParams


def finish_reason(
    params: SamplingParams, token_id: int, *, num_prompt: int, num_output: int, max_model_len: int
) -> FinishReason | None:
    """Whether `token_id`, the `num_output`-th output token (counted from 1), ends the answer."""
    if token_id in params.stop_token_ids and num_output > params.min_tokens:
        return FinishReason.STOP
    if num_output >= params.max_tokens or num_prompt + num_output >= max_model_len:
        return FinishReason.LENGTH
    return None


def suppressed_ids(params: SamplingParams, num_output: int, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ids that must not be drawn after `num_output` tokens: before min_tokens nothing may end the answer."""
    return params.stop_token_ids | eos_token_ids if num_output < params.min_tokens else frozenset()
