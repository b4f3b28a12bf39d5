"""The shared fixtures themselves: a registry that answers and dies, and leak checks that can fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import redis
import redis.asyncio

from tests.support.leaks import children, leaked_children, leaked_tasks
from tests.support.registry import RegistryServer


async def test_registry_answers(registry_url: str) -> None:
    async with redis.asyncio.from_url(registry_url) as client:
        await client.set("pdserve:fixture", b"1", ex=1)
        assert await client.get("pdserve:fixture") == b"1"


def test_a_killed_registry_comes_back_empty() -> None:
    server = RegistryServer()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        client.set("key", b"1")
        server.kill()
        server.start()
        assert client.get("key") is None
    server.kill()


def test_a_left_child_is_found() -> None:
    before = children()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {p.pid for p in leaked_children(before, settle_s=0)} == {child.pid}
    assert not leaked_children(before)


async def test_a_left_task_is_found() -> None:
    before = asyncio.all_tasks()
    task = asyncio.create_task(asyncio.Event().wait())
    assert await leaked_tasks(before, settle_s=0) == {task}
    task.cancel()
    assert not await leaked_tasks(before)
