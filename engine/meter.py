"""Moving averages of what a step takes. Pure: durations come in."""

from __future__ import annotations

from engine.batch import Batch

DECAY = 0.9  # weight of the past at each step: about the last ten steps count


class StepMeter:
    """`step_s` averages all steps; the prefill rate only those that prefilled, weighted by their tokens and time."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 before the first prefill."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    def record(self, batch: Batch, duration_s: float) -> None:
        self.step_s = DECAY * self.step_s + (1 - DECAY) * duration_s if self.step_s > 0 else duration_s
        num_prefill_tokens = sum(len(s.token_ids) for s in batch.sequences if len(s.token_ids) > 1)
        if num_prefill_tokens > 0:
            self._prefill_tokens = DECAY * self._prefill_tokens + num_prefill_tokens
            self._prefill_s = DECAY * self._prefill_s + duration_s
