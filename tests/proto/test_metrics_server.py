"""GET /metrics over a real socket: the few requests that exist, and the many that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from proto.metrics_server import MetricsServer
from tests.support.http import request, scrape


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("requests", "help", registry=registry).inc(3)
    return registry


@pytest.fixture
async def address(registry: CollectorRegistry) -> AsyncIterator[str]:
    server = MetricsServer(registry)
    port = await server.start("127.0.0.1", 0)
    yield f"127.0.0.1:{port}"
    await server.stop()


async def test_metrics_are_served(address: str) -> None:
    assert "requests_total 3.0" in (await scrape(address)).splitlines()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("GET /metrics?name[]=x HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK"),
        ("GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        ("nonsense\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
    ],
)
async def test_other_requests(address: str, text: str, status: str) -> None:
    assert (await request(address, text))[0] == status


async def test_head_has_no_body(address: str) -> None:
    assert await request(address, "HEAD /metrics HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", "")


async def test_an_endless_header_is_cut_off(address: str) -> None:
    assert await request(address, "GET /metrics HTTP/1.1\r\nX: " + "y" * 10_000) == ("", "")


async def test_stop_ends_open_connections(registry: CollectorRegistry) -> None:
    server = MetricsServer(registry)
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start("127.0.0.1", 0))
    writer.write(b"GET /metrics")
    await writer.drain()
    await asyncio.sleep(0)
    await asyncio.wait_for(server.stop(), 20)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    await writer.wait_closed()


async def test_a_taken_port_is_an_error(address: str, registry: CollectorRegistry) -> None:
    with pytest.raises(OSError, match="address already in use"):
        await MetricsServer(registry).start("127.0.0.1", int(address.rpartition(":")[2]))
