"""Logprobs in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from proto.common_pb2 import TokenOutput, TopLogprob

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write


def chat_logprobs(tokens: Sequence[TokenOutput]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion: one entry a token."""
    content = [{**_entry(token), "top_logprobs": [_entry(top) for top in token.top_logprobs]} for token in tokens]
    return {"content": content, "refusal": None}


def _entry(token: TokenOutput | TopLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(raw_bytes(token))}


def completion_logprobs(tokens: Sequence[TokenOutput], offsets: TextOffsets) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `top_logprobs` always has the chosen token, so up to N + 1 entries."""
    return {
        "tokens": [readable(token) for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [_top(token) for token in tokens],
        "text_offset": [offsets.advance(raw_bytes(token)) for token in tokens],
    }


def _top(token: TokenOutput) -> dict[str, float]:
    top = {readable(alternative): finite(alternative.logprob) for alternative in token.top_logprobs}
    top.setdefault(readable(token), finite(token.logprob))
    return top


class TextOffsets:
    """Where each token of a text begins, in characters, when tokens may hold parts of a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def advance(self, raw: bytes) -> int:
        """The offset of the token with bytes `raw`, which follows those given before."""
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(raw))
        return offset


def finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)  # in this order also for NaN


def raw_bytes(token: TokenOutput | TopLogprob) -> bytes:
    return token.raw or token.text.encode()


def readable(token: TokenOutput | TopLogprob) -> str:
    """The token's text; a part of a character is written `bytes:\\xe2\\x82`, so that different tokens differ."""
    try:
        return raw_bytes(token).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
