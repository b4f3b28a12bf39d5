"""A streaming HTTP client that takes little of the cores it shares with the servers: C parsers and uvloop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httptools
from pydantic_core import from_json

from bench.engine.metrics import Timeline
from bench.engine.workload import Request

PATH = "/v1/completions"


class RequestFailed(Exception):
    """The server refused a request or broke off its stream; says what it said."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    port: int
    model: str

    async def run(self, request: Request, timeline: Timeline | None = None) -> Timeline:
        """Sends `request` and collects its stream, into `timeline` if given. Raises RequestFailed.

        Cancelling it closes the connection.
        """
        result = timeline or Timeline(time.perf_counter())
        loop = asyncio.get_running_loop()
        try:
            transport, stream = await loop.create_connection(lambda: _Stream(result), "127.0.0.1", self.port)
        except OSError as error:
            raise RequestFailed(f"port {self.port}: {error}") from None
        try:
            body = request.body(self.model)
            head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            result.sent_at = time.perf_counter()
            transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            await stream.ended
        finally:
            transport.close()
        return result


class _Stream(asyncio.Protocol):
    """Fills a Timeline from a stream of server-sent events; `ended` has the outcome."""

    def __init__(self, timeline: Timeline) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timeline = timeline
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self._now = 0.0

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the stream broke off: {error or self._pending[:500].decode(errors='replace')}")

    def on_body(self, data: bytes) -> None:
        """Called by the parser, after the headers."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines if self._parser.get_status_code() == 200 else ():
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())

    def on_message_complete(self) -> None:
        """Called by the parser. After [DONE] nothing is left to end."""
        self._end(f"status {self._parser.get_status_code()}: {self._pending[:500].decode(errors='replace')}")

    def _on_event(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._end()
            return
        event: dict[str, Any] = from_json(payload)
        if "error" in event:
            self._end(f"the stream failed: {event['error']}")
        elif event.get("choices"):
            self._on_choice(event["choices"][0])
        if usage := event.get("usage"):
            self._timeline.num_prompt_tokens = usage["prompt_tokens"]
            self._timeline.num_tokens = usage["completion_tokens"]

    def _on_choice(self, choice: dict[str, Any]) -> None:
        """A chunk without text is a token too (a part of a character), unless it only says that all is finished."""
        self._timeline.ended_at = self._now
        if choice.get("text") or choice.get("finish_reason") is None:
            self._timeline.token_times.append(self._now)

    def _end(self, error: str = "") -> None:
        if self.ended.done():
            return
        if error:
            self.ended.set_exception(RequestFailed(error))
        else:
            self.ended.set_result(None)
