"""Turns token ids into text as they arrive, and never gives out text that a later token could change. Pure.

Every token stands for bytes (a byte-level piece, a byte-fallback token, or a piece's UTF-8), so the text is the UTF-8
decoding of their concatenation; a character whose bytes are not all there is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """`token_bytes` maps an id to the bytes that it adds to the text; b"" for a special token."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_partial = False  # it holds the begin of a character

    def push(self, token_id: int) -> str:
        """The characters that this token completes. Bytes that are not UTF-8 become U+FFFD."""
        added = self._token_bytes(token_id)
        if not self._is_partial and added.isascii():
            return added.decode()
        text = self._decoder.decode(added)
        self._is_partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The end: what was held back of an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
