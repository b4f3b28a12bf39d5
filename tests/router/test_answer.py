"""From token ids to what the client sees, whoever computed them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from proto import common_pb2, inference_pb2
from proto.errors import InternalError
from router.answer import Answer, Chunk
from router.model import load_model
from router.tokenizer import FakeTokenizer
from router.validation import resolve

GOING_ON = common_pb2.FINISH_REASON_UNSPECIFIED
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def answer(num_prompt: int = 5, **sampling: Any) -> Answer:
    message = inference_pb2.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(**sampling))
    request = resolve(message, range(num_prompt), load_model("fake", ""), 1000, Random(1))
    return Answer(request, FakeTokenizer())


def give(answer: Answer, ids: Sequence[int] | bytes, reason: common_pb2.FinishReason.ValueType = GOING_ON) -> Chunk:
    return answer.accept([common_pb2.TokenOutput(token_id=i) for i in ids], reason)


def test_text_lags_tokens_while_a_character_is_incomplete() -> None:
    subject = answer()
    first = give(subject, "é".encode()[:1])
    assert (first.text, len(first.tokens)) == ("", 1)
    assert give(subject, "é".encode()[1:]).text == "é"


def test_the_end_flushes_what_was_held() -> None:
    subject = answer(stop=["END"])
    assert give(subject, b"xEN").text == "x"
    last = give(subject, [0xC3], LENGTH)
    assert (last.text, last.finish_reason, last.stop_match) == ("EN\ufffd", LENGTH, "")


def test_a_stop_string_cuts_the_text_and_counts_the_completing_token() -> None:
    subject = answer(stop=["END"])
    assert not give(subject, b"xE").stopped
    last = give(subject, b"NDyyy")
    assert (last.text, last.finish_reason, last.stop_match, last.stopped) == ("", STOP, "END", True)
    assert [t.token_id for t in last.tokens] == list(b"ND"), "what came after it is not the client's"
    assert subject.usage().completion_tokens == 4


def test_a_stop_string_at_the_pods_own_end_needs_no_abort() -> None:
    last = give(answer(stop=["END"]), b"xEND", LENGTH)
    assert (last.text, last.finish_reason, last.stop_match, last.stopped) == ("x", STOP, "END", False)


def test_stop_strings_count_from_min_tokens_on() -> None:
    subject = answer(stop=["a"], min_tokens=3)
    assert give(subject, b"a").text == "a"
    assert give(subject, b"a").text == "a"
    assert give(subject, b"a").stop_match == "a"


@pytest.mark.parametrize(("token_id", "match"), [(511, ""), (65, "A")])
def test_a_stop_token_has_no_text(token_id: int, match: str) -> None:
    last = give(answer(stop_token_ids=[65]), [66, token_id], STOP)
    assert (last.text, last.stop_match) == ("B", match)


def test_a_stop_id_at_the_limit_is_ordinary() -> None:
    assert give(answer(ignore_eos=True), b"A", LENGTH).text == "A"


def test_the_same_text_in_any_portions() -> None:
    data = "naïve 👍 END".encode()
    for size in (1, 2, 3, 100):
        subject, text = answer(stop=["END"]), ""
        for start in range(0, len(data), size):
            chunk = give(subject, data[start : start + size])
            text += chunk.text
        assert (text, chunk.stop_match) == ("naïve 👍 ", "END")


def test_usage_is_of_the_attempt_that_gave_the_first_token() -> None:
    subject = answer(num_prompt=5)
    assert subject.usage().cached_tokens == 0
    subject.computed(3)
    subject.computed(4)
    assert subject.usage() == inference_pb2.Usage(prompt_tokens=5, completion_tokens=0, cached_tokens=3)
    greedy = answer(num_prompt=5)
    greedy.computed(99)
    assert greedy.usage().cached_tokens == 5


def test_an_unknown_finish_reason_is_an_error_that_names_it() -> None:
    with pytest.raises(InternalError, match="finish_reason = 9"):
        answer().accept([common_pb2.TokenOutput(token_id=65)], 9)  # type: ignore[arg-type]  # of a later release


def test_logprobs_are_named_without_changing_the_pods_message() -> None:
    token = common_pb2.TokenOutput(token_id=65, logprob=-1, top_logprobs=[common_pb2.TopLogprob(token_id=511)])
    (named,) = answer(logprobs=1).accept([token], GOING_ON).tokens
    assert (named.text, named.raw, named.top_logprobs[0].text) == ("A", b"A", "<end>")
    assert token.text == ""
    (plain,) = answer().accept([token], GOING_ON).tokens
    assert plain.text == ""
