"""From the bytes of a request body to a validated, typed object, or to one error that names the field.

Rules for every field: `null` means absent; types are strict ("1" is not a number); numbers are finite. A field that
cannot change the answer is ignored, one that we do not implement is accepted only with a value that asks for nothing,
and an unknown one is refused, as OpenAI does: a misspelt or unsupported field that is dropped in silence gives an
answer (or a benchmark) to a question that nobody asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json, to_json

from gateway.errors import ApiError
from gateway.unsupported import IGNORED, NEUTRAL

MAX_SHOWN = 80  # characters of an offending value that a message repeats


class Body(BaseModel):
    """The base of all JSON objects that a client sends."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    expected: ClassVar[Mapping[str, str]] = {}  # field -> its type in words, where pydantic's are unclear

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        kept = {name: data[name] for name in known if name in data and not _asks_nothing(name, data[name])}
        kept.update(islice(_unknown(known, data), 1))
        return kept


def _unknown(known: Mapping[str, object], data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is not a field of ours and asks for something. One tells all: pydantic would describe each of a million."""
    return ((name, value) for name, value in data.items() if name not in known and not _asks_nothing(name, value))


def _asks_nothing(name: str, value: Any) -> bool:
    if value is None or name in IGNORED:
        return True
    return any(type(value) is type(v) and value == v for v in NEUTRAL.get(name, ()))


B = TypeVar("B", bound=Body)

_PLAINER = {"too_short": "must not be empty", "model_type": "must be an object"}  # than pydantic's own words


def parse(cls: type[B], raw: bytes) -> B:
    """`raw` as a `cls`. Raises ApiError 400."""
    try:
        data = from_json(raw, cache_strings="none")  # a body repeats few strings, and may hold a million
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _api_error(cls, error.errors(include_url=False, include_context=False)[0]) from None


def _api_error(cls: type[Body], error: ErrorDetails) -> ApiError:
    path = json_path(error["loc"])
    if not path:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    code = _code(error)
    return ApiError(400, f"{path!r} {_complaint(cls, error, code)}", param=path, code=code)


def _code(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "unsupported_parameter" if error["loc"][-1] in NEUTRAL else "unknown_parameter"
    if error["type"] == "missing":
        return "missing_required_parameter"
    return "invalid_type" if error["type"].endswith("_type") else "invalid_value"


def _complaint(cls: type[Body], error: ErrorDetails, code: str) -> str:
    if code == "missing_required_parameter":
        return "is required"
    if code == "unknown_parameter":
        return "is not a known field; docs/openai.md lists those that are"
    if code == "unsupported_parameter":
        return f"= {show(error['input'])} is not supported; {_alternative(str(error['loc'][-1]))}"
    return f"= {show(error['input'])}: {_requirement(cls, error, code)}"


def _alternative(name: str) -> str:
    allowed = " or ".join(show(value) for value in NEUTRAL[name])
    return f"only {allowed} is" if allowed else "leave it out"


def _requirement(cls: type[Body], error: ErrorDetails, code: str) -> str:
    named = [part for part in error["loc"] if isinstance(part, str) and not part.startswith("<")]
    if code == "invalid_type" and named[-1] in cls.expected:
        return f"must be {cls.expected[named[-1]]}"
    return _PLAINER.get(error["type"], error["msg"])


def json_path(loc: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') as "messages[0].role". Names of union members, written '<so>', are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def show(value: Any) -> str:
    """`value` as JSON of bounded length, for which no more of it is read than may be needed."""
    if isinstance(value, dict):
        value = dict(islice(value.items(), MAX_SHOWN))
    elif isinstance(value, list):
        value = value[:MAX_SHOWN]
    text = to_json(value, inf_nan_mode="constants", fallback=str).decode()
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
