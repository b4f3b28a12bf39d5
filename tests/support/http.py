"""One HTTP request over a plain socket, for servers too small to deserve a client library."""

from __future__ import annotations

import asyncio


async def request(address: str, text: str) -> tuple[str, str]:
    """Status line and body of the answer to `text`; empty ones when the server just closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


async def scrape(address: str) -> str:
    """What /metrics says."""
    _, body = await request(address, "GET /metrics HTTP/1.1\r\nHost: pod\r\n\r\n")
    return body
