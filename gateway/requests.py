"""The bodies of `/v1/chat/completions` and `/v1/completions` as typed objects.

Types, what only HTTP clients can get wrong, and how many there may be of anything are checked here, the last before
anything is made of them: a body may hold millions. Ranges of sampling parameters, lengths of prompts and the vocabulary
are checked by the router, which knows the model and serves other clients by the same rules.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from gateway.body import Body
from router.validation import MAX_ID_CHARS, MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

MAX_CHOICES = 128  # of one HTTP request: n times its prompts

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], FailFast()])  # an alias, since FailFast is unhashable
Number = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling each, so that no two keys are one token
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompt_form(value: Any) -> str:
    if isinstance(value, str):
        return "<text>"
    return "<ids>" if isinstance(value, list) and value and isinstance(value[0], int) else "<prompts>"


def _at_most(limit: int, words: str = "{count} entries, at most {limit} are allowed") -> BeforeValidator:
    """Refuses a longer list or object, whatever is in it."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise PydanticCustomError("too_many", words, {"count": len(value), "limit": limit})
        return value

    return BeforeValidator(check)


def _logit_bias(value: Any) -> dict[int, float]:
    """Stops at the first bad entry; pydantic would describe each."""
    if not isinstance(value, dict):
        raise PydanticCustomError("dict_type", "must be an object of token ids and numbers")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= 2**31:
            raise PydanticCustomError(
                "bias_key", 'key {key} must be a token id, such as "50256"', {"key": repr(key[:40])}
            )
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise PydanticCustomError("bias_value", "the bias of {key} must be a number in [-100, 100]", {"key": key})
        bias[int(key)] = float(number)
    return bias


def _form(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<list>"


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # OpenAI's padding against traffic analysis; we never pad


class GenerationBody(Body):
    """What both endpoints share."""

    expected: ClassVar[dict[str, str]] = {"stop": "a string or a list of strings"}

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: Int32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias), _at_most(MAX_LOGIT_BIASES)] = Field(
        default_factory=dict
    )
    seed: Seed | None = None
    stop: Annotated[list[StopString], FailFast(), _at_most(MAX_STOP_STRINGS), BeforeValidator(_listed)] = Field(
        default_factory=list
    )
    # vLLM's extras
    top_k: Int32 | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, _at_most(MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    priority: Int32 = 0
    cache_salt: str = Field("", max_length=MAX_ID_CHARS)


class TextPart(Body):
    type: Literal["text"]
    text: str


TextParts = TypeAliasType("TextParts", Annotated[list[TextPart], FailFast(), Field(min_length=1)])


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[TextParts, Tag("<list>")],
        Discriminator(_form),
    ]
    name: str = ""

    def text(self) -> str:
        """The content; parts are joined by line ends, as vLLM does."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    expected: ClassVar[dict[str, str]] = {**GenerationBody.expected, "content": "a string or a list of text parts"}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None


_Prompts = TypeAliasType(
    "_Prompts",
    Annotated[
        list[Annotated[Annotated[str, Tag("<text>")] | Annotated[TokenIds, Tag("<list>")], Discriminator(_form)]],
        FailFast(),
        Field(min_length=1),
        _at_most(MAX_CHOICES, "{count} prompts are too many: at most {limit} choices a request"),
    ],
)


class CompletionBody(GenerationBody):
    expected: ClassVar[dict[str, str]] = {
        **GenerationBody.expected,
        "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    }

    prompt: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")] | Annotated[_Prompts, Tag("<prompts>")],
        Discriminator(_prompt_form),
    ]
    echo: bool = False
    logprobs: Int32 | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The four forms of `prompt` as a list of prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]

    @property
    def is_prompt_list(self) -> bool:
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
