"""The engine's own OS thread, and the two ways across: commands in, events out.

The thread alone touches the EngineCore. Commands run between steps, in the order they were given, and their results
go to the event loop at once; a step's token events follow in one call. So whoever awaits a command's result has already
seen every event of the steps before it. Without work the thread sleeps on a condition.

What it does between two steps, every step waits for, in caches that the step before has emptied: so no lock is taken
and no load is summed up where nobody could tell.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.batch import EngineLoad, TokenEvent
from engine.core import EngineCore
from engine.tensor_parallel.errors import RankLost
from proto.errors import InternalError

log = logging.getLogger(__name__)
T = TypeVar("T")

HUNG_S = 1.0  # for the thread of an engine that has crashed to end
LOAD_S = 0.05  # how old `EngineThread.load` may be while steps follow one another; heartbeats are rarer


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[EngineCore], Any]
    future: asyncio.Future[Any] | None  # None: nobody waits, and a failure is the engine's


class EngineThread:
    """Start on the running loop. `on_events` and `on_crash` are called on the loop, `on_step` on the engine's thread.

    When the engine raises, every pending and later call fails with InternalError and `on_crash` gets the exception.
    """

    def __init__(
        self,
        core: EngineCore,
        on_events: Callable[[list[TokenEvent]], None],
        *,
        on_crash: Callable[[BaseException], None],
        on_step: Callable[[float], None] = lambda step_s: None,
    ) -> None:
        self._core = core
        self._on_events = on_events
        self._on_crash = on_crash
        self._on_step = on_step
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()  # guarded by _wake, as is _stopping
        self._stopping = False
        self._pending: set[asyncio.Future[Any]] = set()  # touched on the loop only, as is _crash
        self._crash: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.load: EngineLoad = core.load()  # replaced whole by the engine's thread, at rest before events go out
        self._load_at = 0.0  # when it was

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step it is in; pending calls fail. The core may be used by the caller then.

        An engine that was given up may hang on: the thread ends with the process.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, None if self._crash is None else HUNG_S)
        self._fail_pending("the engine has stopped")

    def give_up(self, error: BaseException) -> None:
        """On the loop: what the engine can only raise when its step ends, which may be never."""
        if self._crash is None:
            self._crashed(error)

    async def call(self, run: Callable[[EngineCore], T]) -> T:
        """`run`'s result or exception. Cancelling the caller does not stop `run`: undo it with a later command."""
        if self._crash or self._stopping:
            raise InternalError(f"the engine does not run: {self._crash or 'it has stopped'}")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._enqueue(_Command(run, future))
        return await future

    def post(self, run: Callable[[EngineCore], object]) -> None:
        """Runs `run` after all earlier commands. It must not fail; once the engine has ended it does nothing."""
        if not self._crash:
            self._enqueue(_Command(run, None))

    def _enqueue(self, command: _Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # On the engine's thread.

    def _main(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                if commands:
                    self._run(commands)
                self._step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must learn that the engine is gone
            self._to_loop(self._crashed, error)

    def _next_commands(self) -> list[_Command] | None:
        """What to run before the next step; waits until there is something to do. None: stop."""
        if self._core.has_work and not (self._commands or self._stopping):
            return []  # what comes in this moment is seen a step later, as it would be a moment later
        with self._wake:
            while not (self._commands or self._stopping or self._core.has_work):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            return None if self._stopping else commands

    def _run(self, commands: list[_Command]) -> None:
        results: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        for command in commands:
            if command.future is None:
                command.run(self._core)
                continue
            try:
                results.append((command.future, command.run(self._core), None))
            except Exception as error:  # noqa: BLE001 - handed to the caller
                results.append((command.future, None, error))
        self._note_load(time.monotonic())
        if results:
            self._to_loop(self._settle, results)

    def _step(self) -> None:
        if not self._core.has_work:
            return
        started = time.monotonic()
        events = self._core.step()
        ended = time.monotonic()
        self._on_step(ended - started)
        if ended - self._load_at > LOAD_S or not self._core.has_work:
            self._note_load(ended)
        if events:
            self._to_loop(self._on_events, events)

    def _note_load(self, now: float) -> None:
        self.load, self._load_at = self._core.load(), now

    def _to_loop(self, call: Callable[..., None], argument: object) -> None:
        assert self._loop is not None, "started"
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:  # the loop was closed under us: nobody is left to hear it
            log.debug("event loop closed before the engine's last message")

    # On the event loop.

    def _settle(self, results: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
        for future, value, error in results:
            if future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def _crashed(self, error: BaseException) -> None:
        if self._crash is not None:
            return  # it was given up before
        if isinstance(error.__cause__, RankLost):
            error = error.__cause__  # says all there is to know; the engine around it is sound
        self._crash = error
        name = "" if isinstance(error, RankLost) else f"{type(error).__name__}: "
        self._fail_pending(f"the engine crashed: {name}{error}")
        self._on_crash(error)

    def _fail_pending(self, message: str) -> None:
        for future in list(self._pending):
            if not future.done():
                future.set_exception(InternalError(message))
