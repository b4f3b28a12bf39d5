"""A gateway on a real socket in front of a scripted router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gateway.app import build_app
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from router.gateway_client import GatewayClient
from tests.gateway.scripted import ScriptedRouter

MAX_BODY_BYTES = 100_000


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    router = ScriptedRouter()
    await router.start()
    yield router
    await router.stop()


@pytest.fixture
async def server(router: ScriptedRouter) -> AsyncIterator[HttpServer]:
    async with GatewayClient(router.address) as client:
        app = build_app(client, Metrics(), max_body_bytes=MAX_BODY_BYTES)
        server = HttpServer(app, bind("127.0.0.1", 0), drain_timeout_s=0)
        await server.start()
        yield server
        await server.stop()


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=10, verify=False) as client:
        yield client


@pytest.fixture
async def openai_client(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    transport = DefaultAsyncHttpxClient(verify=False)  # reading the certificates takes longer than most tests
    async with AsyncOpenAI(
        base_url=f"http://{server.address}/v1", api_key="none", max_retries=0, http_client=transport
    ) as client:
        yield client
