"""The most bytes that a token stands for, of tokenizers for which that is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from router.token_length import TokenLength, token_length
from tests.router.test_tokenizer import byte_level, sentencepiece_like


def length_of(tokenizer: tokenizers.Tokenizer) -> TokenLength | None:
    return token_length(json.loads(tokenizer.to_str()))


def llama_like() -> tokenizers.Tokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def gappy() -> tokenizers.Tokenizer:
    """Without tokens for some bytes, as SmolLM2's."""
    tokenizer = byte_level()
    tokenizer.model = models.BPE(vocab={"a": 0, "l": 1, "aa": 2}, merges=[("a", "a")])
    return tokenizer


BOUNDED = {make.__name__: make() for make in (byte_level, gappy, sentencepiece_like, llama_like)}


@pytest.mark.parametrize("name", BOUNDED)
@given(
    parts=st.lists(
        st.sampled_from(["a", " ", "▁", "plain added", "<|im_start|>", "é", "👍", "\0", "hello"]), max_size=20
    )
)
def test_no_text_has_fewer_tokens(name: str, parts: list[str]) -> None:
    tokenizer, text = BOUNDED[name], "".join(parts)
    length = length_of(tokenizer)
    assert length is not None
    assert len(tokenizer.encode(text).ids) >= length.least_tokens(text)


def test_the_longest_may_be_an_added_token() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["é" * 50])
    assert length_of(tokenizer) == TokenLength(100)


def swallowing(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


def composing(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def dropping(tokenizer: tokenizers.Tokenizer) -> None:
    cut = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)


def truncating(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.enable_truncation(10)


def with_unknowns(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.model = models.BPE(vocab={"a": 0}, merges=[], unk_token="a", fuse_unk=True)


@pytest.mark.parametrize("spoil", [swallowing, composing, dropping, truncating, with_unknowns])
@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_not_bounded(make: Callable[[], tokenizers.Tokenizer], spoil: Callable[[tokenizers.Tokenizer], None]) -> None:
    tokenizer = make()
    spoil(tokenizer)
    assert length_of(tokenizer) is None
