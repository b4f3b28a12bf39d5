"""Fixtures of the pull and shm tests. Asserts of shared suites explain themselves only when pytest rewrites them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvtransfer.agent import Agent
    from tests.kvtransfer.pods import Pods

pytest.register_assert_rewrite(
    *(
        f"tests.kvtransfer.{name}"
        for name in ("conformance", "api_conformance", "process_conformance", "support", "pods")
    )
)


@pytest.fixture(params=["inproc", "shm"])
async def pods(request: pytest.FixtureRequest, runtime_dir: Path, no_leaked_tasks: None) -> AsyncIterator[Pods]:
    from tests.kvtransfer.pods import close_pods, make_pods

    pods = make_pods(request.param, runtime_dir)
    yield pods
    await close_pods(pods)


@pytest.fixture
async def faulty(runtime_dir: Path, no_leaked_tasks: None) -> AsyncIterator[Pods]:
    """On inproc, whose posts can be made to fail, stall and land late."""
    from tests.kvtransfer.pods import close_pods, make_pods

    pods = make_pods("inproc", runtime_dir)
    yield pods
    await close_pods(pods)


@pytest.fixture
def target(runtime_dir: Path) -> Iterator[Agent]:
    yield from _shm_agent("target", runtime_dir)


@pytest.fixture
def other(runtime_dir: Path) -> Iterator[Agent]:
    yield from _shm_agent("other", runtime_dir)


def _shm_agent(name: str, runtime_dir: Path) -> Iterator[Agent]:
    from tests.kvtransfer.support import shm_agent

    agent = shm_agent(name, runtime_dir)
    yield agent
    agent.close()
