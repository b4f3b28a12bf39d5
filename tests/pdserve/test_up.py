"""`up` and `demo` with real processes on the fake engine: they serve, restart, stop, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.launcher import LOCK
from pdserve.paths import ROOT
from proto import inference_pb2 as pb
from proto.errors import Overloaded, PodUnavailable
from router.client import RouterClient

LIMIT_S = 60.0


@dataclass
class Launched:
    """A running `python -m pdserve up`: what it printed as its endpoints, and what it says since."""

    process: asyncio.subprocess.Process
    endpoints: dict[str, str]

    @property
    def children(self) -> dict[str, psutil.Process]:
        """By the name of their module; the registry by its binary's."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            found[command[2] if "-m" in command else child.name()] = child
        return found

    async def said(self, words: str) -> str:
        """The next line of stderr that holds `words`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            async for line in self.process.stderr:
                if words in line.decode():
                    return line.decode()
        raise AssertionError(f"the launcher ended without saying {words!r}")


async def launch(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pdserve", *arguments, "--engine", "fake", "--port", "0", "--router-port", "0"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def read_endpoints(process: asyncio.subprocess.Process) -> dict[str, str]:
    assert process.stdout is not None
    endpoints: dict[str, str] = {}
    async with asyncio.timeout(LIMIT_S):
        while "stop" not in endpoints:
            line = (await process.stdout.readline()).decode()
            assert line, "the launcher ended"
            name, _, value = line.strip().partition("  ")
            endpoints[name] = value.strip()
    return endpoints


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Launched]:
    process = await launch("up", *arguments)
    try:
        yield Launched(process, await read_endpoints(process))
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(LIMIT_S):
            await process.communicate()


async def token_ids(launched: Launched, prompt: str, max_tokens: int) -> list[int]:
    request = pb.GenerateRequest(text=prompt)
    request.sampling.temperature, request.sampling.max_tokens = 0, max_tokens
    async with RouterClient(launched.endpoints["router gRPC"].split()[0]) as router:
        return [token.token_id async for response in router.generate(request) for token in response.tokens]


async def gone(children: dict[str, psutil.Process]) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, list(children.values()), 10)
    return not alive


NAMES = {"decode_service": "decode-0", "valkey-server": "registry", "gateway.front": "router+gateway"}


@pytest.mark.parametrize(("how", "front"), [("together", {"gateway.front"}), ("apart", {"router", "gateway"})])
async def test_serves_restarts_what_dies_and_stops_in_order(how: str, front: set[str]) -> None:
    async with up("--front", how) as launched:
        children = launched.children
        assert set(children) == {"valkey-server", "prefill_service", "decode_service", *front}

        # The answer that engine/fake.py computes by hand for "AB", through both front doors.
        assert await token_ids(launched, "AB", 3) == [197, 276, 356]
        body = {"model": "fake", "prompt": "AB", "max_tokens": 3, "temperature": 0, "stream": True}
        async with (
            httpx.AsyncClient(base_url=launched.endpoints["OpenAI HTTP"]) as http,
            http.stream("POST", "/completions", json=body) as answer,
        ):
            lines = [line async for line in answer.aiter_lines()]
        assert "<276>" in "".join(lines)
        assert "data: [DONE]" in lines

        for victim in ("decode_service", *front, "valkey-server"):
            children[victim].send_signal(signal.SIGKILL)
            name = NAMES.get(victim, victim)
            assert "was killed by SIGKILL; starting it again" in await launched.said(f"! {name}")
            await launched.said(f"  {name} ready after")
        assert await retried(launched) == [197, 276, 356]

        children = launched.children
        launched.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(LIMIT_S):
            await launched.said("stopping")
            assert await launched.process.wait() == 0
        assert await gone(children)
        assert not os.path.exists(launched.endpoints["logs"]), "a clean stop leaves no run directory"  # noqa: ASYNC240 - a test


async def test_a_front_killed_in_mid_answer_is_replaced_and_pods_are_free_again(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("pod: {fake_step_s: 0.02}\n")
    async with up("--config", str(file)) as launched:
        body = {"model": "fake", "prompt": "AB", "max_tokens": 900, "stream": True, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=launched.endpoints["OpenAI HTTP"], timeout=LIMIT_S) as http:
            async with http.stream("POST", "/completions", json=body) as answer:
                await anext(answer.aiter_bytes())
                launched.children["gateway.front"].kill()
            assert "was killed by SIGKILL; starting it again" in await launched.said("! router+gateway")
            await launched.said("  router+gateway ready after")
        assert await retried(launched) == [197, 276, 356]
        decode = launched.endpoints["decode-0"].split()[-1]
        async with httpx.AsyncClient() as http, asyncio.timeout(LIMIT_S):
            while "pdserve_sequences_running 0.0" not in (await http.get(decode)).text:  # noqa: ASYNC110 - metrics
                await asyncio.sleep(0.05)


async def retried(launched: Launched) -> list[int]:
    """The answer, once the router that was restarted has found the pods again: a refusal says when to ask again."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await token_ids(launched, "AB", 3)
            except (Overloaded, PodUnavailable) as error:
                await asyncio.sleep(max(error.retry_after_ms, 50) / 1000)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Pytest's own may be too long for UNIX sockets."""
    with tempfile.TemporaryDirectory(prefix="pdserve-test-") as created:
        yield Path(created)


async def test_nothing_survives_a_launcher_that_was_killed(run_dir: Path) -> None:
    async with up("--colocated", "--run-dir", str(run_dir)) as launched:
        children = launched.children
        assert "prefill_service" not in children
        assert await token_ids(launched, "AB", 3) == [197, 276, 356]
        launched.process.kill()
        assert await gone(children)
    async with up("--run-dir", str(run_dir)) as launched:
        assert await token_ids(launched, "AB", 3) == [197, 276, 356]


def holds_lock(process: psutil.Process, run_dir: Path) -> bool:
    lock = run_dir.resolve() / LOCK
    return str(lock) in {file.path for file in process.open_files()}


async def test_a_run_directory_in_use_is_refused(run_dir: Path) -> None:
    async with up("--run-dir", str(run_dir)) as launched:
        process = await launch("up", "--run-dir", str(run_dir))
        out, err = await process.communicate()
        assert (process.returncode, out) == (2, b"")
        assert err.decode() == (f"error: --run-dir {run_dir}: another stack runs in it: stop that, or pass another\n")
        assert holds_lock(psutil.Process(launched.process.pid), run_dir)
        assert not any(holds_lock(child, run_dir) for child in launched.children.values())
        launched.children["decode_service"].kill()
        await launched.said("! decode-0 was killed")
        metrics = (await launched.said("  decode-0 ready after")).split()[-1]
        async with httpx.AsyncClient() as http:
            assert "pdserve_sequences_running" in (await http.get(metrics)).text
        assert await retried(launched) == [197, 276, 356]


async def test_the_readmes_examples_run() -> None:
    readme = (ROOT / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    bodies = re.findall(r"curl .*? -d '(.*?)'", readme, re.DOTALL)
    assert (len(programs), len(bodies)) == (2, 1)
    async with up() as launched:
        http, router = launched.endpoints["OpenAI HTTP"], launched.endpoints["router gRPC"].split()[0]
        for program in programs:
            here = program.replace("http://127.0.0.1:8000/v1", http).replace("127.0.0.1:50051", router)
            assert await printed(here.replace("smollm2-135m-instruct", "fake"))
        async with httpx.AsyncClient(base_url=http) as client:
            answer = await client.post("/chat/completions", json={**json.loads(bodies[0]), "model": "fake"})
        assert answer.status_code == 200
        assert "data: [DONE]" in answer.text


async def printed(program: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out


async def test_a_cache_too_small_for_anything_is_refused_and_for_most_is_told() -> None:
    process = await launch("up", "--kv-memory", "100")
    _, stderr = await process.communicate()
    assert process.returncode == 2
    last = stderr.decode().splitlines()[-1]
    assert last.endswith("-0: --kv-memory 100 bytes: must be at least 256 bytes, one KV block")
    async with up("--kv-memory", "2KiB") as launched:
        words = await launched.said("warning: decode-0: ")
        assert words.endswith("the KV cache holds 128 tokens, longer requests are refused: raise --kv-memory\n")


async def test_a_childs_wrong_setting_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pod: {block_siz: 16}\n")
    process = await launch("up", "--config", str(file))
    out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    last = err.decode().splitlines()[-1]
    assert last.startswith(("error: prefill-0: setting 'block_siz' = 16", "error: decode-0: setting 'block_siz' = 16"))


async def test_demo_streams_an_answer_and_its_ledger() -> None:
    process = await launch("demo", "--prompt", "AB", "--max-tokens", "8")
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    text = out.decode()
    for words in ("KV blocks moved", "it differs from the sum by 0.", "prefill on prefill-0, decode on decode-0"):
        assert words in text
    assert "8 generated; first token" in err.decode()


async def test_ctrl_c_in_the_middle_of_a_demo(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("pod: {fake_step_s: 0.05}\n")
    process = await launch("demo", "--config", str(file), "--max-tokens", "2000")
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(LIMIT_S):
        assert await process.stdout.read(1), await process.stderr.read()
        launched = Launched(process, {})
        children = launched.children
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 130
    assert await gone(children)
