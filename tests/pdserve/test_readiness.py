"""The launcher reads of the router's own metrics which pods it sees; `test_up.py` does so with a real router."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from pdserve import readiness

TEXT = """
# TYPE pdserve_router_pods gauge
pdserve_router_pods{role="decode",state="ready"} 2.0
pdserve_router_pods{role="prefill",state="ready"} 1.0
pdserve_router_pods{role="prefill",state="unreachable"} 3.0
"""


def test_ready_pods_are_counted_by_role() -> None:
    assert readiness.parse_pods(TEXT) == {"decode": 2, "prefill": 1}
    assert readiness.parse_pods("") == {}


def test_nobody_answers() -> None:
    assert readiness.ready_pods("127.0.0.1:1") == {}


async def test_waits_until_enough_of_each_role_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [Counter[str](), Counter(decode=2), Counter(decode=1, prefill=1), Counter(decode=3, prefill=1)]
    monkeypatch.setattr(readiness, "ready_pods", lambda _: looks.pop(0))
    async with asyncio.timeout(10):
        await readiness.router_sees("router", num_prefill=1, num_decode=2)
    assert looks == []
