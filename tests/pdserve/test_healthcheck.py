"""The containers' health check, against real servers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pdserve.paths import ROOT
from proto.service import Server


async def exit_code(kind: str, address: str) -> int:
    script = str(ROOT / "deploy" / "healthcheck.py")
    process = await asyncio.create_subprocess_exec(sys.executable, script, kind, address)
    return await process.wait()


async def test_grpc() -> None:
    server = Server(["pdserve.v1.Inference"])
    port = await server.start("127.0.0.1", 0)
    try:
        await server.set_serving(False)
        assert await exit_code("grpc", f"127.0.0.1:{port}") == 1
        await server.set_serving(True)
        assert await exit_code("grpc", f"127.0.0.1:{port}") == 0
    finally:
        await server.stop(0)


async def test_nobody_there() -> None:
    assert await exit_code("grpc", "127.0.0.1:1") == 1
    assert await exit_code("http", "127.0.0.1:1") == 1


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def http_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def test_http(http_port: int) -> None:
    assert await exit_code("http", f"127.0.0.1:{http_port}") == 0
