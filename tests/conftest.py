"""Fixtures that every folder's tests share: a real registry server, and a check that a test leaves nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.leaks import children, leaked_children, leaked_tasks
from tests.support.registry import RegistryServer


@pytest.fixture(scope="session")
def registry_url() -> Iterator[str]:
    """The URL of a Valkey server shared by the whole session: use a cluster name of your own."""
    server = RegistryServer()
    server.start()
    yield server.url
    server.kill()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a child process or, on its event loop, an asyncio task."""
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("no_leaked_tasks")
    before = children()
    yield
    leaked = leaked_children(before)
    assert not leaked, f"the test left child processes: {leaked}"


@pytest.fixture
async def no_leaked_tasks() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    leaked = await leaked_tasks(before)
    assert not leaked, f"the test left asyncio tasks: {leaked}"
