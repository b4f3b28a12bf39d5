"""What bench_delivery makes of threads' times and of command lines."""

from __future__ import annotations

import os
import time

import pytest

from bench.engine.bench_delivery import costs, name_of, thread_ms


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "-m", "decode_service", "--port", "0"), "pod"),
        (("python", "-m", "router", "--model", "fake"), "router"),
        (("python", "-m", "gateway", "--router", "127.0.0.1:1"), "gateway"),
        (("python", "-m", "gateway.front", "--router.model", "fake"), "front"),
        (("/somewhere/valkey-server", "--port", "0"), "registry"),
        (("python", "-m", "pdserve", "up"), None),
    ],
)
def test_processes_by_their_command_lines(command: tuple[str, ...], name: str | None) -> None:
    assert name_of(command) == name


def test_a_pods_engine_is_counted_apart() -> None:
    pids = {"pod": 1, "router": 5}
    before = {"pod": {1: 10.0, 2: 100.0, 3: 1.0}, "router": {5: 7.0}}
    after = {"pod": {1: 14.0, 2: 109.0, 3: 1.5, 4: 0.25}, "router": {5: 9.0, 6: 1.0}}
    assert costs(pids, before, after) == {"pod": 4.75, "engine": 9.0, "router": 3.0}


def test_threads_are_told_by_id_in_milliseconds() -> None:
    before = thread_ms(os.getpid())[os.getpid()]
    started = time.thread_time()
    while time.thread_time() < started + 0.03:
        pass
    assert 25 <= thread_ms(os.getpid())[os.getpid()] - before < 200
