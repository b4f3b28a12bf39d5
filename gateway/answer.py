"""The router's messages as OpenAI's objects: one `Answer` collects the choices of one HTTP request.

Streaming and not streaming share it, so both report the same text, tokens, finish reasons and usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pydantic_core import to_json

from gateway.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.plan import Plan
from proto import common_pb2 as pb
from proto.errors import InternalError
from proto.inference_pb2 import GenerateRequest, GenerateResponse, Usage

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}

JsonObject = dict[str, Any]


class Choice:
    """One choice: what has arrived of it so far."""

    def __init__(self, index: int, call: GenerateRequest, *, echo: bool, logprobs: bool) -> None:
        self.index = index
        self.logprobs = logprobs
        self.text = ""
        self.tokens: list[pb.TokenOutput] = []  # kept only for logprobs
        self.num_tokens = 0
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.begun = False
        self.offsets = TextOffsets()
        self._echo = echo
        self._prompt_text = call.text

    def add(self, response: GenerateResponse) -> str:
        """Takes in `response` and returns the text it adds. Raises InternalError for an unknown finish reason."""
        text = response.text
        if self._echo and not self.begun:
            text = (self._prompt_text or response.prompt_text) + text
            self.offsets.advance(text.encode())
        self.begun = True
        self.text += text
        tokens = response.tokens
        self.num_tokens += len(tokens)
        if self.logprobs:
            self.tokens.extend(tokens)
        if response.HasField("usage"):
            self.usage = response.usage
        if response.finish_reason:
            self.finish_reason = _finish_reason(response)
        return text


def _finish_reason(response: GenerateResponse) -> str:
    if response.finish_reason not in _FINISH_REASONS:
        raise InternalError(f"the router sent the unknown finish_reason {response.finish_reason}")
    return _FINISH_REASONS[response.finish_reason]


class Format(Protocol):
    """The shapes in which an endpoint presents a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, choice: Choice) -> JsonObject | None: ...
    def delta(self, choice: Choice, text: str, tokens: Sequence[pb.TokenOutput]) -> JsonObject: ...
    def closing(self, choice: Choice) -> JsonObject: ...
    def whole(self, choice: Choice) -> JsonObject: ...


class ChatFormat:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: Choice) -> JsonObject | None:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: Choice, text: str, tokens: Sequence[pb.TokenOutput]) -> JsonObject:
        return self._chunk(choice, {"content": text}, chat_logprobs(tokens) if choice.logprobs else None)

    def closing(self, choice: Choice) -> JsonObject:
        return self._chunk(choice, {})

    def whole(self, choice: Choice) -> JsonObject:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.tokens) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _chunk(self, choice: Choice, delta: JsonObject, logprobs: JsonObject | None = None) -> JsonObject:
        finish_reason = None if delta else choice.finish_reason
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionFormat:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, choice: Choice) -> JsonObject | None:
        return None

    def delta(self, choice: Choice, text: str, tokens: Sequence[pb.TokenOutput]) -> JsonObject:
        logprobs = completion_logprobs(tokens, choice.offsets) if choice.logprobs else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def closing(self, choice: Choice) -> JsonObject:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}

    def whole(self, choice: Choice) -> JsonObject:
        return {**self.delta(choice, choice.text, choice.tokens), "finish_reason": choice.finish_reason}


def server_id(answer_id: str) -> str:
    """The server's id of a request, of which an answer's id is made; also of that id itself."""
    for shape in (ChatFormat, CompletionFormat):
        answer_id = answer_id.removeprefix(shape.id_prefix)
    return answer_id


class Answer:
    """Collects the responses of all calls of a plan and renders them. `created` is in seconds since the epoch."""

    def __init__(self, plan: Plan, shape: Format, created: int) -> None:
        self._plan = plan
        self._shape = shape
        self._created = created
        self._model = ""
        self._chunk_head = b""
        self.request_id = ""  # the server's, of the first choice that began
        self.choices = [
            Choice(index, call, echo=plan.echo, logprobs=plan.logprobs) for index, call in enumerate(plan.calls)
        ]

    def add(self, index: int, response: GenerateResponse) -> None:
        """Takes in `response` of call `index`, for an answer that is not streamed."""
        self._note(response)
        self.choices[index].add(response)

    def chunks(self, index: int, response: GenerateResponse) -> Iterator[bytes]:
        """Takes in `response` of call `index` and gives the chunks to stream, as JSON."""
        self._note(response)
        choice = self.choices[index]
        first = not choice.begun
        text = choice.add(response)
        if first and (opening := self._shape.opening(choice)):
            yield self._delta(opening)
        tokens = response.tokens
        if text or tokens:
            yield self._delta(self._shape.delta(choice, text, tokens))
        if choice.finish_reason is not None:
            yield self._delta(self._shape.closing(choice))

    def usage_chunk(self) -> bytes:
        """The last chunk of a stream with `include_usage`."""
        return self._chunk([], self._usage())

    def whole(self) -> bytes:
        choices = [self._shape.whole(choice) for choice in self.choices]
        return to_json({**self._envelope(self._shape.whole_object), "choices": choices, "usage": self._usage()})

    def _note(self, response: GenerateResponse) -> None:
        if not self.request_id:
            self.request_id, self._model = response.request_id, response.model
            self._chunk_head = to_json(self._envelope(self._shape.chunk_object))[:-1] + b',"choices":'

    def _delta(self, choice: JsonObject) -> bytes:
        usage = self._usage_so_far() if self._plan.continuous_usage else None
        return self._chunk([choice], usage)

    def _chunk(self, choices: list[JsonObject], usage: JsonObject | None) -> bytes:
        """What all chunks begin with was made once."""
        tail = b',"usage":' + to_json(usage) + b"}" if self._plan.include_usage else b"}"
        return self._chunk_head + to_json(choices) + tail

    def _envelope(self, kind: str) -> JsonObject:
        return {
            "id": self._shape.id_prefix + self.request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,  # the router does not say which weights revision answered
        }

    def _usage(self) -> JsonObject:
        """A prompt counts once, whatever `n`; its cached tokens are those that none of its choices computed."""
        usages = [choice.usage or Usage() for choice in self.choices]
        groups = [usages[i : i + self._plan.n] for i in range(0, len(usages), self._plan.n)]
        return _usage_object(
            prompt_tokens=sum(group[0].prompt_tokens for group in groups),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(min(usage.cached_tokens for usage in group) for group in groups),
        )

    def _usage_so_far(self) -> JsonObject | None:
        """None as long as a prompt's length is not known."""
        firsts = [choice.usage for choice in self.choices]
        if any(usage is None for usage in firsts):
            return None
        known = self._usage()
        return _usage_object(
            prompt_tokens=known["prompt_tokens"],
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=known["prompt_tokens_details"]["cached_tokens"],
        )


def _usage_object(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> JsonObject:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
