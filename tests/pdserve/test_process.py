"""One child: READY, its end, its stop, and that it dies with its launcher."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.process import SHIM, Process, ProcessFailed, endpoint, parse_fields
from tests.pdserve import scripts

START_S = 20.0


async def test_ready_line_is_parsed_and_sigterm_ends_it(tmp_path: Path) -> None:
    process = Process(scripts.spec(scripts.SERVE), tmp_path / "x.log")
    await process.start(START_S)
    assert process.ready_fields == {"role": "x", "address": "127.0.0.1:1"}
    pid = process.pid
    assert pid is not None
    await process.stop()
    assert not psutil.pid_exists(pid)
    assert "READY role=x" in (tmp_path / "x.log").read_text()


async def test_warnings_are_kept_until_the_ready_line(tmp_path: Path) -> None:
    process = Process(scripts.spec(scripts.WARNING), tmp_path / "x.log")
    for _ in range(2):
        await process.start(START_S)
        assert process.warnings == ["it is small"]
        await process.stop()


async def test_a_child_that_ends_early_tells_its_code_and_last_lines(tmp_path: Path) -> None:
    process = Process(scripts.spec(scripts.FAILING), tmp_path / "x.log")
    with pytest.raises(ProcessFailed, match="x exited with code 3") as caught:
        await process.start(START_S)
    assert caught.value.exit_code == 3
    assert caught.value.tail == "before the end"


async def test_a_child_that_never_is_ready_is_killed(tmp_path: Path) -> None:
    process = Process(scripts.spec(scripts.SILENT), tmp_path / "x.log")
    with pytest.raises(ProcessFailed, match=r"x was not ready within 0 s"):
        await process.start(timeout_s=0.2)
    assert process.pid is None


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = Process(scripts.spec(scripts.STUBBORN, stop_grace_s=0.2), tmp_path / "x.log")
    await process.start(START_S)
    await process.stop()
    assert await process.wait() == "was killed by SIGKILL"


async def test_cancelled_start_leaves_a_child_that_stop_ends(tmp_path: Path) -> None:
    process = Process(scripts.spec(scripts.SILENT), tmp_path / "x.log")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.start(START_S), timeout=0.5)
    await process.stop(grace_s=0)
    assert process.pid is None


async def test_stop_before_start_does_nothing(tmp_path: Path) -> None:
    await Process(scripts.spec(scripts.SERVE), tmp_path / "x.log").stop()


async def test_children_die_with_a_launcher_that_was_killed() -> None:
    launcher = f"""
import os, subprocess, sys, signal
child = subprocess.Popen([*{SHIM!r}, str(os.getpid()), sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", launcher, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child = psutil.Process(int(await process.stdout.readline()))
    process.kill()
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [child], 10)
    assert not alive


async def test_a_child_whose_launcher_is_gone_already_does_not_run() -> None:
    nobody = str(os.getppid())  # not the parent of what we start
    process = await asyncio.create_subprocess_exec(*SHIM, nobody, "/bin/sh", "-c", "kill -9 $$")
    assert await process.wait() == 0, "the command ran"


def test_fields_of_a_ready_line() -> None:
    assert parse_fields("READY gateway address=[::1]:80") == {"address": "[::1]:80"}
    assert parse_fields("Ready to accept connections") == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("READY role=x address=127.0.0.1:1 metrics=127.0.0.1:2", "127.0.0.1:1  metrics http://127.0.0.1:2/metrics"),
        ("READY front router=127.0.0.1:1 metrics=127.0.0.1:2", "metrics http://127.0.0.1:2/metrics"),
        ("READY gateway address=127.0.0.1:1", "127.0.0.1:1"),
        ("Ready to accept connections", ""),
    ],
)
def test_where_a_child_listens(line: str, said: str) -> None:
    assert endpoint(parse_fields(line)) == said
