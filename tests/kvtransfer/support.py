"""Helpers of the transfer tests: waiting for things that happen elsewhere, and a peer in another OS process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtransfer.agent import Agent, AgentConfig

PATIENCE_S = 20.0


def until(condition: Callable[[], object]) -> None:
    """Polls until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def shm_agent(name: str, runtime_dir: Path) -> Agent:
    """With a backend that gives sick peers up soon."""
    agent = Agent(name, AgentConfig(backends=[]))
    agent.create_backend("shm", {"runtime_dir": str(runtime_dir), "timeout_s": "0.5"})
    return agent


def drain(agent: Agent, num_messages: int = 1) -> dict[str, list[bytes]]:
    """The next notifications, once there are `num_messages`."""
    got: dict[str, list[bytes]] = {}

    def enough() -> bool:
        for name, messages in agent.get_new_notifs().items():
            got.setdefault(name, []).extend(messages)
        return sum(map(len, got.values())) >= num_messages

    until(enough)
    return got


class Child:
    """A Python module in a process of its own, which answers one JSON value a line to one [command, arguments...]."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid

    def ask(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, f"the peer did not answer {command}"
        return json.loads(self._process.stdout.readline())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            if self._process.poll() is None:
                os.kill(self.pid, signal.SIGCONT)

    def wait(self) -> None:
        self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """The child's side: runs what stdin says until it ends."""
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(commands[command](*arguments)), flush=True)


class PeerProcess(Child):
    """An agent named "peer"; see peer_process.py for what it can be asked."""

    def __init__(self, backend: str, params: Mapping[str, str], num_bytes: int, fill: int) -> None:
        super().__init__("tests.kvtransfer.peer_process", backend, json.dumps(dict(params)), str(num_bytes))
        self.metadata = bytes.fromhex(self.ask("metadata"))
        self.address = int(self.ask("address"))
        self.ask("fill", fill)
