"""A pod refuses bad sequences itself, naming field and limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.fake import FAKE_MODEL
from engine.sequence import SamplingParams
from pod.spec import parse_spec
from proto import pods_pb2
from proto.errors import InvalidRequest
from tests.support.pod_client import sampling, spec


def test_every_parameter_reaches_the_engine() -> None:
    message = spec(
        [1, 2],
        [3],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        logit_bias={4: 5.0},
        seed=2**64 - 1,
        stop_token_ids=[9, 511],
        max_tokens=8,
        min_tokens=2,
        ignore_eos=True,
        logprobs=3,
    )
    message.priority = -1
    message.cache_salt = "salt"
    parsed = parse_spec(message, FAKE_MODEL)
    assert (parsed.prompt_ids, parsed.output_ids, parsed.priority, parsed.cache_salt) == ((1, 2), (3,), -1, "salt")
    assert parsed.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        logit_bias={4: 5.0},
        seed=2**64 - 1,
        stop_token_ids=frozenset({9, 511}),
        max_tokens=8,
        min_tokens=2,
        ignore_eos=True,
        num_logprobs=3,
    )


def test_absent_logprobs_differ_from_zero() -> None:
    assert parse_spec(spec([1]), FAKE_MODEL).params.num_logprobs is None
    assert parse_spec(spec([1], logprobs=0), FAKE_MODEL).params.num_logprobs == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logit_bias", {512: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("stop", ["text"]),
        ("stop_token_ids", list(range(1025))),
    ],
)
def test_bad_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"sequence\.sampling\.{field}.*must be") as caught:
        parse_spec(spec([1, 2, 3], **{field: value}), FAKE_MODEL)
    assert caught.value.field.startswith(f"sequence.sampling.{field}")


@pytest.mark.parametrize("name", ["temperature", "seed", "max_tokens"])
def test_unresolved_parameters_are_refused(name: str) -> None:
    params = sampling()
    params.ClearField(name)  # type: ignore[arg-type]  # the stub wants a literal
    message = pods_pb2.SequenceSpec(sequence_id="a", prompt_token_ids=[1], sampling=params)
    with pytest.raises(InvalidRequest, match=rf"sequence\.sampling\.{name} = unset"):
        parse_spec(message, FAKE_MODEL)


@pytest.mark.parametrize(
    ("prompt", "output", "field"),
    [
        ([], [], "prompt_token_ids"),
        ([512], [], "prompt_token_ids"),
        ([-1, 5], [], "prompt_token_ids"),
        ([1], [600], "output_token_ids"),
        ([1], [2] * 16, "output_token_ids"),
        ([1] * 4096, [], "prompt_token_ids"),
    ],
)
def test_bad_tokens_are_named(prompt: list[int], output: list[int], field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"sequence\.{field} = .*must be"):
        parse_spec(spec(prompt, output), FAKE_MODEL)


@pytest.mark.parametrize("sequence_id", ["", "x" * 257])
def test_bad_ids_are_named(sequence_id: str) -> None:
    message = pods_pb2.SequenceSpec(sequence_id=sequence_id, prompt_token_ids=[1], sampling=sampling())
    with pytest.raises(InvalidRequest, match=r"sequence\.sequence_id"):
        parse_spec(message, FAKE_MODEL)
