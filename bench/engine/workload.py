"""The prompts: token ids, so that no tokeniser makes them shorter for one server than for another.

Drawn at random by (case, round, index): equal for all servers, and no prompt shares a prefix with another, so that no
prefix cache helps. What they say is nonsense; with greedy sampling and ignore_eos the answers' length is fixed all the
same.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

FIRST_ID, LAST_ID = 1000, 40000  # ordinary tokens of the default model


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int

    def body(self, model: str) -> bytes:
        """Of POST /v1/completions; every server here takes these fields."""
        return json.dumps(
            {
                "model": model,
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


def requests(case: str, number: int, count: int, num_prompt_tokens: int, max_tokens: int) -> list[Request]:
    """`count` requests of round `number` of `case`."""
    rng = random.Random(f"{case} {number}")
    return [
        Request(tuple(rng.randint(FIRST_ID, LAST_ID) for _ in range(num_prompt_tokens)), max_tokens)
        for _ in range(count)
    ]
