"""The most bytes that a token stands for, of tokenizers for which that is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from router.token_length import longest_token
from tests.router.test_tokenizer import byte_level, sentencepiece_like


def longest(tokenizer: tokenizers.Tokenizer) -> int | None:
    return longest_token(json.loads(tokenizer.to_str()))


def llama_like() -> tokenizers.Tokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {make.__name__: make() for make in (byte_level, sentencepiece_like, llama_like)}


@pytest.mark.parametrize("name", BOUNDED)
@given(
    parts=st.lists(
        st.sampled_from(["a", " ", "▁", "plain added", "<|im_start|>", "é", "👍", "\0", "hello"]), max_size=20
    )
)
def test_no_text_has_fewer_tokens(name: str, parts: list[str]) -> None:
    tokenizer, text = BOUNDED[name], "".join(parts)
    length = longest(tokenizer)
    assert length is not None
    assert len(tokenizer.encode(text).ids) * length >= len(text.encode())


def test_the_longest_may_be_an_added_token() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["é" * 50])
    assert longest(tokenizer) == 100


def swallowing(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


def composing(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def dropping(tokenizer: tokenizers.Tokenizer) -> None:
    cut = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)


def truncating(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.enable_truncation(10)


def without_all_bytes(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.model = models.BPE(vocab={"a": 0}, merges=[])


@pytest.mark.parametrize("spoil", [swallowing, composing, dropping, truncating, without_all_bytes])
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_not_bounded(make: Callable[[], tokenizers.Tokenizer], spoil: Callable[[tokenizers.Tokenizer], None]) -> None:
    tokenizer = make()
    spoil(tokenizer)
    assert longest(tokenizer) is None
