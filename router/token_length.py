"""How many bytes of text one token stands for at most: a text of more than that many times n has more than n tokens.

Known only for tokenizers that shorten nothing and drop at most single bytes, which is read from their description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split"}  # pre-tokenizers that only cut


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is printable, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + number): b for number, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenLength:
    """`longest` in bytes of text; `dropped` are bytes of which the tokenizer makes no token."""

    longest: int
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        return math.ceil(len(text.encode().translate(None, self.dropped)) / self.longest)


def token_length(description: dict[str, Any]) -> TokenLength | None:
    """By the content of a `tokenizer.json`; None where a token may stand for any length of text."""
    model, added = description["model"], description["added_tokens"]
    cutters = _parts(description["pre_tokenizer"], "pretokenizers")
    kinds = {part["type"] for part in cutters}
    if model["type"] != "BPE" or not kinds <= _KEEPING or description.get("truncation"):
        return None
    if any(part.get("behavior") == "Removed" for part in cutters):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):  # they swallow the spaces beside them
        return None
    length = _byte_level(description) if "ByteLevel" in kinds else _byte_fallback(description)
    if length is None:
        return None
    return TokenLength(max([length.longest, *(len(token["content"].encode()) for token in added)]), length.dropped)


def _byte_level(description: dict[str, Any]) -> TokenLength | None:
    """A character of a piece is a byte; one that is no piece of its own may be left out of the tokens."""
    vocab = description["model"]["vocab"]
    if description["normalizer"] is not None or description["model"].get("unk_token") is not None:
        return None
    dropped = bytes(byte for character, byte in BYTE_ALPHABET.items() if character not in vocab)
    return TokenLength(max(map(len, vocab)), dropped)


def _byte_fallback(description: dict[str, Any]) -> TokenLength | None:
    """A vocabulary with a token for each byte, so that nothing is unknown or fused into one."""
    vocab = description["model"]["vocab"]
    if not description["model"].get("byte_fallback") or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        return None
    if not all(map(_only_lengthens, _parts(description["normalizer"], "normalizers"))):
        return None
    return TokenLength(max(len(piece.encode()) for piece in vocab))


def _only_lengthens(normalizer: dict[str, Any]) -> bool:
    """Llama's: a space in front, and U+2581 for each."""
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"])
    return bool(normalizer["type"] == "Prepend")


def _parts(node: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if node is None:
        return []
    return list(node[name]) if node["type"] == "Sequence" else [node]
