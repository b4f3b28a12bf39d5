"""`python -m pdserve up` as its user runs it: a process that prints its endpoints and stops on Ctrl-C."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from pdserve.paths import ROOT
from tests.support.http import scrape
from tests.support.polling import until

STOP_S = 60.0
IDLE_S = 15.0
HELD = ("sequences_waiting", "sequences_running", "leases", "credits", "transfers", 'blocks{state="used"}')


@dataclass(frozen=True, slots=True)
class LaunchedStack:
    """Endpoints by the names that `up` printed; pods are called prefill-0, decode-0, ..."""

    process: subprocess.Popen[str]
    endpoints: dict[str, str]

    @property
    def router_address(self) -> str:
        return self.endpoints["router gRPC"].split()[0]

    @property
    def http_url(self) -> str:
        return self.endpoints["OpenAI HTTP"]

    @property
    def pods(self) -> list[str]:
        return [name for name in self.endpoints if name.startswith(("prefill-", "decode-"))]

    async def gauge(self, pod: str, name: str) -> float:
        """The pod's metric `pdserve_NAME`."""
        address = self.endpoints[pod].rpartition("http://")[2].removesuffix("/metrics")
        found = re.search(rf"^pdserve_{re.escape(name)} (\S+)$", await scrape(address), re.MULTILINE)
        assert found, f"{pod} has no metric pdserve_{name}"
        return float(found[1])

    async def idle(self) -> None:
        """Waits until no pod holds anything: blocks, leases, credits, transfers, sequences. Raises TimeoutError."""

        async def holds_nothing() -> bool:
            return not any([await self.gauge(pod, name) for pod in self.pods for name in HELD])

        await until(holds_nothing, IDLE_S)

    def pod_process(self, pod: str) -> psutil.Process:
        """The process that serves `pod`."""
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            if "--pod-id" in command and command[command.index("--pod-id") + 1] == pod:
                return child
        raise AssertionError(f"no process serves {pod}")


@contextmanager
def launched_stack(*arguments: str) -> Iterator[LaunchedStack]:
    """Runs `up` on free ports; at the end it must stop cleanly."""
    command = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--router-port", "0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield LaunchedStack(process, read_endpoints(process))
        finally:
            process.terminate()
            process.wait(STOP_S)
    assert process.returncode == 0, f"up ended with {process.returncode}"


def read_endpoints(process: subprocess.Popen[str]) -> dict[str, str]:
    """The table that `up` prints when it is ready; it gives up by itself when that does not come to be."""
    assert process.stdout is not None
    endpoints: dict[str, str] = {}
    while "stop" not in endpoints:
        line = process.stdout.readline()
        assert line, "up ended before it was ready"
        name, _, value = line.strip().partition("  ")
        endpoints[name] = value.strip()
    return endpoints
