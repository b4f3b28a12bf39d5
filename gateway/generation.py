"""`/v1/chat/completions` and `/v1/completions`: one ASGI app each, alike but for the body and the shapes.

A request's story: read the body, make a plan of router calls, run them all, and render what arrives. The status line
waits for the first token, so everything that is refused is refused with its HTTP status, streaming or not. What fails
later ends a stream with an error event and neither a finish reason nor [DONE]. A client that leaves cancels the calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic

from starlette.types import Receive, Scope, Send

from gateway.answer import Answer, ChatFormat, CompletionFormat, Format
from gateway.body import B, parse
from gateway.errors import ApiError, from_pdserve, internal
from gateway.exchange import BodyLimits, ClientGone, Exchange
from gateway.fanout import merge
from gateway.metrics import Metrics
from gateway.plan import Plan, plan_chat, plan_completion
from gateway.requests import ChatBody, CompletionBody
from proto.errors import InternalError, PdserveError
from proto.inference_pb2 import GenerateResponse
from router.client import Client

log = logging.getLogger(__name__)

STOPPING = ApiError(503, "the gateway is stopping", code="stopping", headers={"retry-after": "1"})
MAX_REQUEST_ID = 256  # characters of X-Request-ID
LARGE_BODY_BYTES = 32 * 2**10  # of which reading takes at most some 3 ms


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    name: str
    body: type[B]
    plan: Callable[[B, str], Plan]
    shape: Format


CHAT = Endpoint("chat_completions", ChatBody, plan_chat, ChatFormat())
COMPLETIONS = Endpoint("completions", CompletionBody, plan_completion, CompletionFormat())


class Generation(Generic[B]):
    """The ASGI app of one endpoint. `clock` is monotonic, `wall_clock` gives seconds since the epoch."""

    def __init__(
        self,
        endpoint: Endpoint[B],
        router: Client,
        metrics: Metrics,
        *,
        body_limits: BodyLimits,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint = endpoint
        self._router = router
        self._metrics = metrics
        metrics.tokens.counts[endpoint.name] = 0
        self._body_limits = body_limits
        self._clock = clock
        self._wall_clock = wall_clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        name, start = self._endpoint.name, self._clock()
        with self._metrics.running.labels(name).track_inprogress():
            try:
                await self._serve(exchange)
            finally:
                self._metrics.requests.labels(name, str(exchange.status or 499)).inc()
                self._metrics.duration.labels(name).observe(self._clock() - start)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            request_id = _adopt_request_id(exchange)
            _check_headers(exchange)
            raw = await exchange.read_body(self._body_limits)
            await exchange.run_until_disconnect(self._answer(exchange, raw, request_id))
        except ClientGone:
            exchange.status = 499
        except ApiError as error:
            if error.status >= 500:
                log.warning("%s: %d %s: %s", self._endpoint.name, error.status, error.code, error.message)
            await exchange.fail(error)
        except asyncio.CancelledError:  # only a stop whose grace is over cancels us; the client must hear of it
            await exchange.fail(STOPPING)
        except Exception:
            log.exception("%s failed", self._endpoint.name)
            await exchange.fail(internal())

    async def _answer(self, exchange: Exchange, raw: bytes, request_id: str) -> None:
        plan = await self._plan(raw, request_id)
        answer = Answer(plan, self._endpoint.shape, int(self._wall_clock()))
        try:
            async with aclosing(self._responses(plan)) as responses:
                if plan.stream:
                    await self._stream(exchange, plan, answer, responses)
                else:
                    await self._collect(exchange, answer, responses)
        except InternalError as error:  # of what the router sent, not by it
            raise from_pdserve(error) from error

    async def _plan(self, raw: bytes, request_id: str) -> Plan:
        """Raises ApiError. What is large is read on another thread, while the tokens of others go on."""
        if len(raw) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(self._read, raw, request_id)
        return self._read(raw, request_id)

    def _read(self, raw: bytes, request_id: str) -> Plan:
        return self._endpoint.plan(parse(self._endpoint.body, raw), request_id)

    async def _responses(self, plan: Plan) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
        """Every response of every call of `plan`. Raises ApiError, and InternalError when one ends without its last
        message.
        """
        start = self._clock()
        name, counts = self._endpoint.name, self._metrics.tokens.counts
        unfinished = set(range(len(plan.calls)))
        async with aclosing(merge([self._call(plan, choice) for choice in range(len(plan.calls))])) as merged:
            first = True
            async for index, response in merged:
                if first:
                    self._metrics.ttft.labels(name).observe(self._clock() - start)
                    first = False
                counts[name] += len(response.tokens)
                if response.finish_reason:
                    unfinished.discard(index)
                yield index, response
        if unfinished:
            raise InternalError(
                f"the router ended {len(unfinished)} of {len(plan.calls)} answers without a finish reason"
            )

    async def _call(self, plan: Plan, choice: int) -> AsyncGenerator[GenerateResponse, None]:
        """Raises ApiError, which names the field as the client does."""
        try:
            async with aclosing(self._router.generate(plan.calls[choice])) as responses:
                async for response in responses:
                    yield response
        except PdserveError as error:
            raise from_pdserve(error, plan.param(error.field, choice)) from error

    async def _collect(
        self, exchange: Exchange, answer: Answer, responses: AsyncIterator[tuple[int, GenerateResponse]]
    ) -> None:
        async for index, response in responses:
            answer.add(index, response)
        await exchange.respond(200, answer.whole(), _id_header(answer))

    async def _stream(
        self, exchange: Exchange, plan: Plan, answer: Answer, responses: AsyncIterator[tuple[int, GenerateResponse]]
    ) -> None:
        async for index, response in responses:
            chunks = list(answer.chunks(index, response))
            if not exchange.streaming:
                await exchange.start_stream(_id_header(answer))
            if chunks:
                await exchange.events(*chunks)
        usage = [answer.usage_chunk()] if plan.include_usage else []
        await exchange.events(*usage, b"[DONE]")
        await exchange.end_stream()


def _id_header(answer: Answer) -> dict[str, str]:
    """The server's id, for the timeline; of several choices the first that began."""
    return {"x-pdserve-request-id": answer.request_id}


def _adopt_request_id(exchange: Exchange) -> str:
    """The client's X-Request-ID, which every answer repeats; empty without."""
    value = exchange.headers.get("x-request-id", "")
    if len(value) > MAX_REQUEST_ID or not value.isascii() or not value.isprintable():
        raise ApiError(
            400, f"X-Request-ID must be at most {MAX_REQUEST_ID} printable ASCII characters", code="invalid_header"
        )
    if value:
        exchange.extra_headers["x-request-id"] = value
    return value


def _check_headers(exchange: Exchange) -> None:
    kind = exchange.headers.get("content-type", "application/json")
    if not _is_json(kind):
        raise ApiError(
            415,
            f"Content-Type {kind[:100]!r} is not supported; send application/json, in UTF-8",
            code="unsupported_media_type",
        )
    coding = exchange.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(
            415,
            f"Content-Encoding {coding[:100]!r} is not supported; send the body as it is",
            code="unsupported_encoding",
        )


def _is_json(content_type: str) -> bool:
    """Whether it is of JSON in UTF-8, of which ASCII is a part."""
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charsets = [value.strip('"') for name, _, value in (p.partition("=") for p in parameters) if name == "charset"]
    return media_type == "application/json" and {"utf-8", "utf8", "us-ascii"}.issuperset(charsets)
