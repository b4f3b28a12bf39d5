"""The conformance suite on each backend."""

from __future__ import annotations

from pathlib import Path

from tests.kvtransfer.api_conformance import ApiConformance
from tests.kvtransfer.conformance import AgentConformance
from tests.kvtransfer.process_conformance import ProcessConformance


class TestInproc(AgentConformance, ApiConformance):
    backend = "inproc"


class TestShm(AgentConformance, ApiConformance):
    backend = "shm"

    def params(self, runtime_dir: Path) -> dict[str, str]:
        return {"runtime_dir": str(runtime_dir)}


class TestShmProcesses(ProcessConformance):
    backend = "shm"

    def params(self, runtime_dir: Path) -> dict[str, str]:
        return {"runtime_dir": str(runtime_dir), "timeout_s": "0.5"}
