"""Small child processes for the launcher's own tests, each a Python program of one line."""

from __future__ import annotations

import sys

from pdserve.process import ProcessSpec

SERVE = "import signal, sys; print('READY role=x address=127.0.0.1:1', flush=True); signal.sigwait([signal.SIGTERM])"
WARNING = f"print('WARNING it is small'); print('said'); {SERVE}; print('WARNING too late')"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('READY', flush=True); signal.pause()"
SILENT = "import signal; signal.pause()"
FAILING = "import sys; print('before the end', file=sys.stderr); sys.exit(3)"


def spec(source: str, name: str = "x", *, stage: int = 0, stop_grace_s: float = 10.0) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-c", source),
        start_stage=stage,
        stop_stage=-stage,
        ready_marker="READY",
        stop_grace_s=stop_grace_s,
    )
