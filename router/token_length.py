"""How many bytes of text one token stands for at most: a text of more than that many times n has more than n tokens.

Known only for tokenizers that drop and shorten nothing, which is read from their own description.
"""

from __future__ import annotations

from typing import Any

_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split"}  # pre-tokenizers that only cut


def longest_token(description: dict[str, Any]) -> int | None:
    """In bytes, by the content of a `tokenizer.json`; None where a token may stand for any length of text."""
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
    length = _longest_piece(description, is_byte_level="ByteLevel" in kinds)
    return length and max([length, *(len(token["content"].encode()) for token in added)])


def _longest_piece(description: dict[str, Any], *, is_byte_level: bool) -> int | None:
    """Of a vocabulary that has a token for each byte, so that nothing is unknown or fused into one."""
    vocab = description["model"]["vocab"]
    normalizers = _parts(description["normalizer"], "normalizers")
    if is_byte_level:  # a character of a piece is a byte
        complete = sum(len(piece) == 1 for piece in vocab) >= 256
        return max(map(len, vocab)) if complete and not normalizers else None
    if not description["model"].get("byte_fallback") or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        return None
    if not all(map(_only_lengthens, normalizers)):
        return None
    return max(len(piece.encode()) for piece in vocab)


def _only_lengthens(normalizer: dict[str, Any]) -> bool:
    """Llama's: a space in front, and U+2581 for each."""
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"])
    return bool(normalizer["type"] == "Prepend")


def _parts(node: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if node is None:
        return []
    return list(node[name]) if node["type"] == "Sequence" else [node]
