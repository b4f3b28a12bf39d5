"""`python -m gateway` as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.gateway.scripted import ScriptedRouter, answer

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0


@asynccontextmanager
async def gateway(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *flags,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def refusal(*flags: str) -> tuple[int | None, str]:
    """The exit code and what was said, of a gateway that does not start."""
    async with gateway(*flags) as process:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert out == b""
    return process.returncode, err.decode()


async def test_serves_then_finishes_its_streams_on_sigterm(router: ScriptedRouter) -> None:
    go_on = asyncio.Event()
    first, last = answer("Hello", " world")
    router.play(first, go_on, last)
    async with gateway("--port", "0", "--router", router.address) as process:
        assert process.stdout is not None
        ready = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode()
        assert ready.startswith("READY gateway address=127.0.0.1:")
        async with httpx.AsyncClient(base_url=f"http://{ready.strip().partition('=')[2]}", timeout=LIMIT_S) as http:
            assert (await http.get("/health")).status_code == 200
            async with http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
                lines = response.aiter_lines()
                assert "Hello" in await anext(lines)
                process.send_signal(signal.SIGTERM)
                go_on.set()
                rest = [line async for line in lines if line]
        _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert rest[-1] == "data: [DONE]"
    assert process.returncode == 0
    assert b"Traceback" not in err


async def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = await refusal("--port", str(port))
    assert code == 2
    where = f"127.0.0.1:{port}"
    assert said == f"gateway: cannot listen on {where}: Address already in use; choose another host or port\n"


async def test_an_unknown_host_is_one_clear_line() -> None:
    code, said = await refusal("--host", "no.such.host.invalid", "--port", "0")
    assert code == 2
    assert said.startswith("gateway: cannot listen on no.such.host.invalid:0: ")
    assert said.count("\n") == 1


async def test_a_bad_setting_is_named() -> None:
    bad = {
        ("--port", "70000"): "'port' = '70000'",
        ("--max-body-bytes", "0"): "max_body_bytes",
        ("--router", ""): "'router' = ''",
        ("--nope", "1"): "nope",
    }
    for (code, said), words in zip(
        await asyncio.gather(*(refusal(*flags) for flags in bad)), bad.values(), strict=True
    ):
        assert code == 2
        assert words in said
        assert "Traceback" not in said


async def test_starts_without_torch() -> None:
    check = "import sys, gateway.__main__; print(sorted({'torch', 'transformers', 'engine'} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", check, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert out.decode().strip() == "[]"
