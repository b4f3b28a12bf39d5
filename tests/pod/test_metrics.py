"""What a pod serves on /metrics, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.batch import TokenEvent
from engine.sequence import FinishReason, SampledToken
from pod.metrics import PodMetrics
from pod.metrics_server import MetricsServer
from proto.registry_pb2 import PodLoad


@pytest.fixture
async def served() -> AsyncIterator[tuple[PodMetrics, int]]:
    load = PodLoad(num_blocks=10, num_free_blocks=4, num_leases=1, num_credits=2, num_transfers=3, num_running=5)
    metrics = PodMetrics(lambda: load)
    server = MetricsServer(metrics.registry)
    port = await server.start("127.0.0.1", 0)
    yield metrics, port
    await server.stop()


async def request(port: int, text: str) -> tuple[str, str]:
    """Status line and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


def event(reason: FinishReason | None) -> TokenEvent:
    return TokenEvent("a", SampledToken(1), reason, 0, 2, arrived_at=0, first_scheduled_at=0, at=0)


async def test_gauges_and_counters(served: tuple[PodMetrics, int]) -> None:
    metrics, port = served
    metrics.on_events([event(None), event(FinishReason.STOP)])
    metrics.step_s.observe(0.02)
    status, body = await request(port, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    lines = body.splitlines()
    for line in (
        'pdserve_blocks{state="free"} 4.0',
        'pdserve_blocks{state="used"} 6.0',
        "pdserve_leases 1.0",
        "pdserve_credits 2.0",
        "pdserve_transfers 3.0",
        "pdserve_sequences_running 5.0",
        "pdserve_tokens_total 2.0",
        "pdserve_preemptions_total 2.0",
        'pdserve_sequences_finished_total{reason="stop"} 1.0',
        "pdserve_step_seconds_count 1.0",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        ("nonsense\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
    ],
)
async def test_other_requests(served: tuple[PodMetrics, int], text: str, status: str) -> None:
    assert (await request(served[1], text))[0] == status


async def test_head_has_no_body(served: tuple[PodMetrics, int]) -> None:
    assert await request(served[1], "HEAD /metrics HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", "")


async def test_an_endless_header_is_cut_off(served: tuple[PodMetrics, int]) -> None:
    assert await request(served[1], "GET /metrics HTTP/1.1\r\nX: " + "y" * 100_000) == ("", "")


async def test_stop_ends_open_connections(served: tuple[PodMetrics, int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served[1])
    writer.write(b"GET /metrics")
    await writer.drain()
    server = MetricsServer(served[0].registry)
    await server.start("127.0.0.1", 0)
    await server.stop()
    writer.close()
    assert not reader.at_eof()
