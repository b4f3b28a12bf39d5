"""What the launcher says: a live table on a terminal, plain lines elsewhere. Progress goes to stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from pdserve.supervisor import Phase, ProcessEvent


class Reporter:
    """Receives process events. Inside `starting()` on a terminal they move a live table, else each is a line."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._rows: dict[str, tuple[ProcessEvent, float]] = {}
        self._live: Live | None = None

    def __call__(self, event: ProcessEvent) -> None:
        self._rows[event.name] = (event, self._clock())
        if self._live is None:
            self._line(event)

    def say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A spinner beside `what` on a terminal; elsewhere a line when it took a second or more."""
        began = self._clock()
        with self.console.status(what) if self.console.is_terminal else contextlib.nullcontext():
            yield
        if (took_s := self._clock() - began) >= 1.0:
            self.say(f"  {what}: {took_s:.0f} s")

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Covers the start of the stack."""
        if not self.console.is_terminal:
            yield
            return
        live = Live(get_renderable=self._table, console=self.console, refresh_per_second=8, transient=True)
        with live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def _line(self, event: ProcessEvent) -> None:
        if event.phase is Phase.READY:
            self.say(f"  {event.name} ready after {event.seconds:.1f} s  {event.detail}".rstrip())
        elif event.phase is Phase.DIED:
            first, *tail = event.detail.splitlines()
            self.say(f"! {event.name} {first}; starting it again in {event.seconds:.1f} s. Its last lines:")
            for line in tail:
                self.say(f"    {line}")

    def _table(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for name, (event, at) in self._rows.items():
            if event.phase is Phase.READY:
                grid.add_row("[green]✓[/]", name, f"ready after {event.seconds:.1f} s")
            else:
                grid.add_row(Spinner("dots"), name, f"{event.phase.value} {self._clock() - at:.1f} s")
        return grid
