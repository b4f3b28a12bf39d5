"""What a request has produced so far: token ids, readable text, why it ended. Pure; survives changes of pods.

Pods send token ids; this turns them into what the client sees and finds stop strings, identically for a first token
from a prefill pod, a token from a decode pod and a token replayed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from proto import common_pb2, inference_pb2
from proto.errors import InternalError
from router.detokenizer import Detokenizer
from router.stop import StopMatcher
from router.tokenizer import Tokenizer
from router.validation import ResolvedRequest

_FINISH_REASONS = frozenset(common_pb2.FinishReason.values())


class Chunk(NamedTuple):
    """News for the client. `stopped`: a stop string ended the answer here, and the pod does not know yet."""

    text: str
    tokens: tuple[common_pb2.TokenOutput, ...]
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    stop_match: str = ""
    stopped: bool = False


class Answer:
    """Owned by one request. `output_ids` are the tokens given to the client."""

    def __init__(self, request: ResolvedRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._matcher = StopMatcher(request.stop)
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._min_tokens = request.sampling.min_tokens
        self._wants_logprobs = request.wants_logprobs
        self._cached_tokens: int | None = None
        self.output_ids: list[int] = []

    def computed(self, num_cached_tokens: int) -> None:
        """A pod has computed the prompt. Only what served the first token counts as cached."""
        if self._cached_tokens is None:
            self._cached_tokens = min(num_cached_tokens, len(self._request.prompt_ids))

    def accept(
        self, tokens: Iterable[common_pb2.TokenOutput], finish_reason: common_pb2.FinishReason.ValueType
    ) -> Chunk:
        """Takes the tokens of one message; `finish_reason` is the pod's and belongs to the last of them.

        Raises InternalError for a finish reason that this release does not know.
        """
        if finish_reason not in _FINISH_REASONS:
            raise InternalError(f"finish_reason = {finish_reason}: unknown to this router")
        incoming = tuple(tokens)
        num_readable = len(incoming) - self._ends_by_id(incoming, finish_reason)
        text = ""
        for accepted, token in enumerate(incoming, start=1):
            token_id = token.token_id
            self.output_ids.append(token_id)
            piece = self._detokenizer.push(token_id) if accepted <= num_readable else ""
            matched = self._matcher.feed(piece, enabled=self._past_min_tokens)
            text += matched.text
            if matched.match is not None:
                stopped = finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED or accepted < len(incoming)
                return self._chunk(text, incoming[:accepted], common_pb2.FINISH_REASON_STOP, matched.match, stopped)
        if finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
            return self._chunk(text, incoming, finish_reason)
        tail, finish_reason, match = self._end(finish_reason)
        return self._chunk(text + tail, incoming, finish_reason, match)

    def usage(self) -> inference_pb2.Usage:
        return inference_pb2.Usage(
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=len(self.output_ids),
            cached_tokens=self._cached_tokens or 0,
        )

    def prompt_text(self) -> str:
        return b"".join(map(self._tokenizer.token_bytes, self._request.prompt_ids)).decode(errors="replace")

    @property
    def _past_min_tokens(self) -> bool:
        return len(self.output_ids) >= self._min_tokens

    def _ends_by_id(
        self, tokens: Sequence[common_pb2.TokenOutput], finish_reason: common_pb2.FinishReason.ValueType
    ) -> bool:
        """The last token, if it stops the answer, is no part of its text."""
        stopped = finish_reason == common_pb2.FINISH_REASON_STOP and len(tokens) > 0
        return stopped and tokens[-1].token_id in self._stop_ids

    def _end(
        self, finish_reason: common_pb2.FinishReason.ValueType
    ) -> tuple[str, common_pb2.FinishReason.ValueType, str]:
        """The text held back so far, and how the answer ended: the last, incomplete character may complete a stop."""
        matched = self._matcher.feed(self._detokenizer.flush(), enabled=self._past_min_tokens)
        if matched.match is not None:
            return matched.text, common_pb2.FINISH_REASON_STOP, matched.match
        last = self.output_ids[-1] if self.output_ids else None
        by_user_id = finish_reason == common_pb2.FINISH_REASON_STOP and last in self._request.user_stop_ids
        match = self._tokenizer.token_label(last).decode(errors="replace") if by_user_id and last is not None else ""
        return matched.text + self._matcher.flush(), finish_reason, match

    def _chunk(
        self,
        text: str,
        tokens: tuple[common_pb2.TokenOutput, ...],
        finish_reason: common_pb2.FinishReason.ValueType,
        match: str = "",
        stopped: bool = False,
    ) -> Chunk:
        if self._wants_logprobs:
            tokens = tuple(self._with_text(token) for token in tokens)
        return Chunk(text, tokens, finish_reason, match, stopped)

    def _with_text(self, token: common_pb2.TokenOutput) -> common_pb2.TokenOutput:
        """A copy that says in words what each id is."""
        named = common_pb2.TokenOutput()
        named.CopyFrom(token)
        entries: list[common_pb2.TokenOutput | common_pb2.TopLogprob] = [named, *named.top_logprobs]
        for entry in entries:
            entry.raw = self._tokenizer.token_label(entry.token_id)
            entry.text = entry.raw.decode(errors="replace")
        return named
