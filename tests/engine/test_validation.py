from __future__ import annotations

import math
from typing import Any

import pytest

from engine.fake import FAKE_MODEL
from engine.validation import validate_spec
from tests.engine.pure import spec


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ({"min_tokens": -1}, "min_tokens = -1"),
        ({"min_tokens": 17}, r"min_tokens = 17: must be 0 \.\. max_tokens"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1: must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: must be above 0"),
        ({"presence_penalty": 2.5}, r"presence_penalty = 2.5: must be finite, -2 \.\. 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty = -3.0"),
        ({"logit_bias": {7: 101.0}}, r"logit_bias\[7\] = 101.0"),
        ({"logit_bias": {512: 1.0}}, r"logit_bias holds 512: must be 0 \.\. 511"),
        ({"stop_token_ids": frozenset({-1})}, "stop_token_ids holds -1"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
        ({"num_logprobs": 21}, r"num_logprobs = 21: must be 0 \.\. 20"),
    ],
)
def test_each_bad_parameter_is_named_with_its_limit(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_spec(spec("x", [1], **params), FAKE_MODEL)


@pytest.mark.parametrize(
    ("sequence_id", "prompt", "output", "message"),
    [
        ("", [1], [], "sequence_id"),
        ("x", [], [], "prompt_ids = "),
        ("x", [512], [], "prompt_ids holds 512"),
        ("x", [1], [-1], "output_ids holds -1"),
        ("x", [1] * 4096, [], "4096 tokens: must be at most 4095"),
        ("x", [1] * 4090, [1] * 6, "4096 tokens: must be at most 4095"),
        ("x", [1], [1] * 16, "output_ids has 16 tokens: must be below max_tokens 16"),
    ],
)
def test_each_bad_token_list_is_named(sequence_id: str, prompt: list[int], output: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_spec(spec(sequence_id, prompt, output=output), FAKE_MODEL)


def test_the_limits_themselves_are_allowed() -> None:
    edge = spec(
        "x",
        [0, 511] * 2047,
        temperature=0.0,
        top_p=1.0,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, 511: 100.0},
        seed=2**64 - 1,
        max_tokens=1,
        min_tokens=1,
        num_logprobs=20,
    )
    validate_spec(edge, FAKE_MODEL)
