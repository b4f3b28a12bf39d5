"""`python -m pdserve demo`: one streamed answer, and where its time went."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import TextIO

from rich.console import Console

from pdserve import ledger
from pdserve.console import Reporter
from pdserve.launcher import Stack, run_directory, run_stack
from pdserve.prepare import prepare
from pdserve.settings import DemoSettings
from proto import inference_pb2 as pb
from router.client import RouterClient


def main(settings: DemoSettings) -> int:
    began = settings.started_at or time.time()
    reporter = Reporter()
    with run_directory(settings.run_dir) as run_dir:
        plan = prepare(settings, run_dir, reporter)
        return asyncio.run(run_stack(plan, reporter, lambda stack: _ask(settings, stack, reporter, began)))


async def _ask(settings: DemoSettings, stack: Stack, reporter: Reporter, began: float) -> int:
    reporter.say(f"\n> {settings.prompt}\n")
    answers = Printer(sys.stdout, began)
    request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=settings.prompt)]))
    request.sampling.max_tokens = settings.max_tokens
    request.sampling.temperature = settings.temperature
    async with RouterClient(stack.plan.router_address) as router, aclosing(router.generate(request)) as responses:
        async for response in responses:
            answers.show(response)
    answers.finish()
    Console(highlight=False).print(ledger.render(answers.last.ledger))
    reporter.say(answers.summary())
    return 0


class Printer:
    """Writes an answer as it arrives, and keeps its last message."""

    def __init__(self, out: TextIO, began: float, clock: Callable[[], float] = time.time) -> None:
        self.last = pb.GenerateResponse()
        self._out = out
        self._began = began
        self._clock = clock
        self._first_s: float | None = None

    def show(self, response: pb.GenerateResponse) -> None:
        if self._first_s is None and response.tokens:
            self._first_s = self._clock() - self._began
        self._out.write(response.text)
        self._out.flush()
        self.last = response

    def finish(self) -> None:
        self._out.write("\n\n")
        self._out.flush()

    def summary(self) -> str:
        usage = self.last.usage
        counts = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated"
        return f"{counts}; first token {self._first_s or 0.0:.1f} s after the command"
