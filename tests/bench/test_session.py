"""Turns, failures and clean-up, with arms that only pretend; then a real server process and the client against it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from bench.engine.cases import Measured
from bench.engine.client import Endpoint, RequestFailed
from bench.engine.servers import NotRun, Program, Server, ServerSpec, family, free_port
from bench.engine.session import Session, arms_of
from bench.engine.worker import Worker
from bench.engine.workload import Request
from tests.support.polling import until


class FakeArm:
    """Notes its turns in `log`; fails where it is told to."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name = name
        self._log = log
        self._fails = fails

    async def start(self) -> None:
        if self._fails == "start":
            raise NotRun("cannot start here")
        self._log.append(f"start {self.name}")

    async def measure(self, case: str, number: int) -> Measured:
        if self._fails == case:
            raise RequestFailed("it broke off")
        self._log.append(f"{case} {number} {self.name}")
        await asyncio.sleep(0)
        return {f"{case}.x": 1.0}

    def pids(self) -> Sequence[int]:
        return [os.getpid()]

    def freeze(self) -> None:
        self._log.append(f"freeze {self.name}")

    def thaw(self) -> None:
        self._log.append(f"thaw {self.name}")

    async def stop(self) -> None:
        self._log.append(f"stop {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("bench.engine.session.IDLE_S", 0.01)
    return []


def make_session(log: list[str], fails: dict[str, str] | None = None) -> Session:
    async def make(name: str) -> FakeArm:
        return FakeArm(name, log, (fails or {}).get(name, ""))

    return Session(make, lambda text: None)


async def test_arms_take_turns_whose_order_alternates(log: list[str]) -> None:
    session = make_session(log)
    await session.run(["prefill"], ["ours", "vllm"], 2)
    assert [line for line in log if line.startswith("prefill")] == [
        "prefill 0 ours",
        "prefill 0 vllm",
        "prefill 1 vllm",
        "prefill 1 ours",
    ]
    assert [line for line in log if line.endswith(" ours")] == [
        "start ours",
        "freeze ours",
        *("thaw ours", "prefill 0 ours", "freeze ours"),
        *("thaw ours", "prefill 1 ours", "freeze ours"),
        "stop ours",
    ]
    assert len([each for each in session.record.rounds if ("ours", "prefill.x") in each]) == 2


async def test_what_fails_is_stopped_and_told_and_the_others_go_on(log: list[str]) -> None:
    session = make_session(log, {"vllm": "prefill", "limits": "start"})
    await session.run(["prefill"], ["limits", "ours", "vllm"], 2)
    assert session.record.not_run == {"limits": "cannot start here", "vllm": "prefill: it broke off"}
    assert log.count("stop vllm") == 1
    assert len([line for line in log if line.startswith("prefill")]) == 2


async def test_everything_is_stopped_when_the_run_is_cancelled(log: list[str]) -> None:
    session = make_session(log)
    task = asyncio.create_task(session.run(["prefill"], ["ours", "vllm"], 10**6))

    async def busy() -> bool:
        return "prefill 1 ours" in log

    await until(busy)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {"stop ours", "stop vllm"} <= set(log)


def test_a_phase_starts_only_what_its_cases_need() -> None:
    assert arms_of(["eight", "memory"], ["vllm", "ours", "vllm_pd"]) == ["ours", "vllm"]


# A real process

SERVER = """
import asyncio, sys
EVENTS = sys.argv[2].encode().decode("unicode_escape").encode()
async def serve(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    if head.startswith(b"GET"):
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    else:
        writer.write(EVENTS)
    await writer.drain()
    writer.close()
async def main():
    child = await asyncio.create_subprocess_exec("sleep", "600")
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""
HEAD = "HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"


def chunk(text: str) -> str:
    return f"{len(text):x}\\r\\n{text}\\r\\n"


def stream(*events: str) -> str:
    """Events as one HTTP answer; cut into pieces that end anywhere."""
    body = "".join(f"data: {text}\n\n" for text in events)
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    return HEAD + "".join(chunk(piece).replace("\n", "\\n") for piece in pieces) + "0\\r\\n\\r\\n"


def server(tmp_path: Path, answer: str) -> Server:
    port = free_port()
    program = Program(name="p", command=(sys.executable, "-c", SERVER, str(port), answer), port=port)
    spec = ServerSpec(name="s", programs=(program,), start_timeout_s=30, kv_pool_bytes=lambda _: 0)
    return Server(spec, tmp_path)


TOKEN = '{"choices": [{"text": "a", "finish_reason": null}]}'
PART = '{"choices": [{"text": "", "finish_reason": null}]}'
LAST = '{"choices": [{"text": "", "finish_reason": "length"}]}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}'
REQUEST = Request((1, 2, 3, 4), 3)


async def test_a_server_lives_and_its_whole_family_ends(tmp_path: Path) -> None:
    started = server(tmp_path, stream(TOKEN, PART, TOKEN, LAST, USAGE, "[DONE]"))
    await started.start()
    pids = [process.pid for process in started.processes]
    assert len(pids) == 2  # its child too
    timeline = await started.endpoint.run(REQUEST)
    assert (len(timeline.token_times), timeline.num_tokens, timeline.num_prompt_tokens) == (3, 3, 4)
    assert timeline.sent_at < timeline.token_times[0] <= timeline.ended_at
    started.freeze()
    await until(lambda: {psutil.Process(pid).status() for pid in pids} == {psutil.STATUS_STOPPED})
    await started.stop()
    assert started.processes == [] == family(pids[0])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("HTTP/1.1 400 Bad\\r\\nContent-Length: 7\\r\\n\\r\\nrefused", "status 400: refused"),
        (HEAD + chunk("data: "), "broke off"),
        (stream(TOKEN, '{"error": {"message": "lost"}}'), "the stream failed: .*lost"),
        (stream(TOKEN), "status 200"),
        ("what?\\r\\n\\r\\n", "no HTTP"),
    ],
)
async def test_a_bad_answer_is_no_measurement(tmp_path: Path, answer: str, message: str) -> None:
    started = server(tmp_path, answer)
    try:
        await started.start()
        with pytest.raises(RequestFailed, match=message):
            await started.endpoint.run(REQUEST)
    finally:
        await started.stop()


async def test_nobody_listens() -> None:
    with pytest.raises(RequestFailed, match="Connect"):
        await Endpoint(free_port(), "m").run(REQUEST)


async def test_a_server_that_ends_at_once_says_its_last_error(tmp_path: Path) -> None:
    program = Program(name="p", command=(sys.executable, "-c", "raise OSError('no AVX')"), port=free_port())
    failing = Server(ServerSpec(name="s", programs=(program,), start_timeout_s=30, kv_pool_bytes=lambda _: 0), tmp_path)
    with pytest.raises(NotRun, match="p ended with code 1: OSError: no AVX"):
        await failing.start()
    assert failing.processes == []


async def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    program = Program(name="p", command=("/nowhere/vllm",), port=free_port())
    failing = Server(ServerSpec(name="s", programs=(program,), start_timeout_s=30, kv_pool_bytes=lambda _: 0), tmp_path)
    with pytest.raises(NotRun, match="/nowhere/vllm: no such program"):
        await failing.start()


async def test_a_worker_answers_line_by_line_and_says_why_it_ended(tmp_path: Path) -> None:
    source = "import sys, json\nfor line in sys.stdin: print(json.dumps({'n': json.loads(line)['n'] + 1}), flush=True)"
    worker = Worker((sys.executable, "-c", source), tmp_path / "w.log", {})
    assert await worker.call({"n": 1}) == {"n": 2}
    (pid,) = worker.pids()
    await worker.stop()
    assert family(pid) == []
    broken = Worker((sys.executable, "-c", "raise SystemExit('no torch')"), tmp_path / "b.log", {})
    with pytest.raises(NotRun, match="no torch"):
        await broken.call({})
