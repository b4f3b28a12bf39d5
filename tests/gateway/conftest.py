"""A gateway on a real socket in front of a scripted router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gateway.app import build_app
from gateway.exchange import BodyLimits
from gateway.metrics import Metrics
from gateway.server import HttpServer, bind
from router.client import Client
from router.gateway_client import GatewayClient
from tests.gateway.scripted import ScriptedRouter

BODY_LIMITS = BodyLimits(max_bytes=100_000, timeout_s=60)


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    router = ScriptedRouter()
    await router.start()
    yield router
    await router.stop()


@asynccontextmanager
async def serving(router: Client, body_limits: BodyLimits = BODY_LIMITS) -> AsyncIterator[HttpServer]:
    server = HttpServer(build_app(router, Metrics(), body_limits), bind("127.0.0.1", 0), drain_timeout_s=0)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def server(router: ScriptedRouter) -> AsyncIterator[HttpServer]:
    async with GatewayClient(router.address) as client, serving(client) as server:
        yield server


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
