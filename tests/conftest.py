"""Fixtures that every folder's tests share: a real registry server, and a check that a test leaves nothing running."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.leaks import children, leaked_children, leaked_tasks
from tests.support.registry import RegistryServer

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


# A slow machine is no failure. The rest is what `--hypothesis-profile` can name: "few" draws the same handful every
# time, for the interpreter of Triton; "mutants" likewise, and the first failure will do; "thorough" draws anew, even
# in CI.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
settings.register_profile("few", max_examples=8, derandomize=True)
settings.register_profile(
    "mutants", settings.get_profile("few"), phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
)
settings.register_profile("thorough", max_examples=200, derandomize=False, print_blob=True)


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


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short path: a UNIX socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pd-") as path:
        yield Path(path)


@pytest.fixture
async def cluster(registry_url: str, runtime_dir: Path, no_leaked_tasks: None) -> AsyncIterator[Cluster]:
    """Starts in-process pods on the fake engine; at the end each that lives must have come back to rest."""
    from tests.support.cluster import running_cluster

    async with running_cluster(registry_url, runtime_dir) as cluster:
        yield cluster
