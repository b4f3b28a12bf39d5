"""Lines for a pipe, a table for a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from pdserve.console import Reporter
from pdserve.supervisor import Phase, ProcessEvent


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    reporter = Reporter(Console(file=out, width=200))
    with reporter.starting():
        reporter(ProcessEvent("router", Phase.STARTING))
        reporter(ProcessEvent("router", Phase.READY, 1.25))
        reporter(ProcessEvent("decode-0", Phase.READY, 1.25, "127.0.0.1:1"))
    reporter(ProcessEvent("router", Phase.DIED, 0.5, "was killed by SIGKILL\nlast [words]"))
    assert out.getvalue().splitlines() == [
        "  router ready after 1.2 s",
        "  decode-0 ready after 1.2 s  127.0.0.1:1",
        "! router was killed by SIGKILL; starting it again in 0.5 s. Its last lines:",
        "    last [words]",
    ]


def test_table_on_a_terminal() -> None:
    out = io.StringIO()
    reporter = Reporter(Console(file=out, width=80, force_terminal=True))
    with reporter.starting():
        reporter(ProcessEvent("router", Phase.READY, 1.25))
        reporter(ProcessEvent("gateway", Phase.STARTING))
    assert "✓" in out.getvalue()
    assert "gateway" in out.getvalue()
