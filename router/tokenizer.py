"""Text to token ids and back: the model's own tokenizer, or the fake model's. Neither imports torch.

`token_bytes` is what makes text exact while it streams: the bytes each token adds, whatever its neighbours are.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from proto import inference_pb2
from proto.errors import InvalidRequest
from router.model import FAKE, FAKE_EOS, FAKE_VOCAB_SIZE, ModelError
from router.token_length import BYTE_ALPHABET, TokenLength, token_length

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Thread-safe."""

    token_length: TokenLength | None  # None where it is not bounded

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        """`rendered`: by `render_chat`, so that nothing is put in front of it any more."""
        ...

    def render_chat(self, messages: Sequence[inference_pb2.ChatMessage]) -> str:
        """With the prompt for the assistant's turn. Raises InvalidRequest when the template refuses the messages."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; b"" for a special or unknown one."""
        ...

    def token_label(self, token_id: int) -> bytes:
        """What to show a person: as `token_bytes`, but a special token's name."""
        ...


def load_tokenizer(path: str) -> Tokenizer:
    """`path` is a Hugging Face directory or "fake". Raises ModelError."""
    return FakeTokenizer() if path == FAKE else HFTokenizer(Path(path))


class FakeTokenizer:
    """Ids 0..255 are bytes, 256..510 read "<256>".., 511 is end of text."""

    token_length: TokenLength | None = TokenLength(1)

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Sequence[inference_pb2.ChatMessage]) -> str:
        return "".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant: "

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return f"<{token_id}>".encode() if token_id < FAKE_VOCAB_SIZE and token_id != FAKE_EOS else b""

    def token_label(self, token_id: int) -> bytes:
        return b"<end>" if token_id == FAKE_EOS else self.token_bytes(token_id)


class HFTokenizer:
    """A Hugging Face fast tokenizer with its chat template."""

    def __init__(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # seconds; the fake needs none of it

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"model: cannot load the tokenizer of {directory}: {file.name} is missing")
        try:
            # No length of its own, of which it would warn in the log: the limit is the pods', and is checked.
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory), model_max_length=sys.maxsize)
        except Exception as error:  # noqa: BLE001  # the library raises anything for a damaged file
            raise ModelError(f"model: cannot load the tokenizer of {directory}: {_one_line(error)}") from None
        added = self._tokenizer.added_tokens_decoder
        self._special: dict[int, bytes] = {i: t.content.encode() for i, t in added.items() if t.special}
        self._plain_added: dict[int, bytes] = {i: t.content.encode() for i, t in added.items() if not t.special}
        description = json.loads(self._tokenizer.backend_tokenizer.to_str())
        self._piece_bytes = _piece_decoder(description)
        self.token_length = token_length(description)
        self._bytes_of: dict[int, bytes] = {}  # of tokens seen: looking one up takes microseconds
        self._check_template(directory)

    def _check_template(self, directory: Path) -> None:
        """Compiles it, if there is one. Raises ModelError."""
        if self._tokenizer.chat_template is None:
            return
        from jinja2 import TemplateSyntaxError  # noqa: PLC0415  # comes with transformers' chat templates

        try:
            self.render_chat([inference_pb2.ChatMessage(role="user", content="Hello")])
        except TemplateSyntaxError as error:
            what = f"line {error.lineno}: {_one_line(error)}"
            raise ModelError(f"model: the chat template of {directory} is broken: {what}") from None
        except Exception as error:  # noqa: BLE001  # one that is whole may refuse this chat and take others
            log.info("the chat template does not take a lone question: %s", _one_line(error))

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not rendered)
        return ids

    def render_chat(self, messages: Sequence[inference_pb2.ChatMessage]) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError  # noqa: PLC0415  # as above

        if self._tokenizer.chat_template is None:
            raise InvalidRequest("chat: this model has no chat template, send text or tokens", field="chat")
        given = [{"role": m.role, "content": m.content, **({"name": m.name} if m.name else {})} for m in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        except TemplateSyntaxError:
            raise  # the model's mistake, found at the start
        except TemplateError as error:
            raise InvalidRequest(f"chat: the model's template refuses it: {error}", field="chat") from None
        return text

    def token_bytes(self, token_id: int) -> bytes:
        if (known := self._bytes_of.get(token_id)) is not None:
            return known
        self._bytes_of[token_id] = added = self._look_up(token_id)
        return added

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._special:
            return b""
        if token_id in self._plain_added:
            return self._plain_added[token_id]
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def token_label(self, token_id: int) -> bytes:
        return self._special.get(token_id) or self.token_bytes(token_id)


def _one_line(error: Exception) -> str:
    """What it says, at most 300 characters; a KeyError says nothing without its name."""
    text = repr(error) if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())[:300]


# --- Pieces to bytes ------------------------------------------------------------------------------------------------

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _piece_decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """How this tokenizer's pieces stand for bytes. Raises ModelError for a kind that we cannot stream exactly."""
    decoder = description["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece
    raise ModelError(f"model: tokenizer decoder {sorted(kinds)}: must be ByteLevel, ByteFallback or Metaspace")


def _byte_level(piece: str) -> bytes:
    return bytes(BYTE_ALPHABET[character] for character in piece)


def _sentencepiece(piece: str) -> bytes:
    """A byte-fallback token is its byte; in any other piece U+2581 is a space."""
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    return bytes([int(fallback[1], 16)]) if fallback else piece.replace("\u2581", " ").encode()
