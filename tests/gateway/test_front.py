"""`python -m gateway.front`: a router and a gateway in one process, as their clients and their person see it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.front_settings import FrontSettings
from proto.settings import ConfigError
from router.client import RouterClient
from tests.router.support import collect, long_running
from tests.router.test_end_to_end import assert_right
from tests.router.test_process import Process
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 900, "stream": True, "ignore_eos": True}


@asynccontextmanager
async def front(cluster: Cluster, **gateway: object) -> AsyncIterator[tuple[Process, httpx.AsyncClient]]:
    """The process with a client of its HTTP address, once requests can be served."""
    flags = {
        "router.model": "fake",
        "router.port": 0,
        "router.registry-url": cluster.registry_url,
        "router.cluster": cluster.name,
        "gateway.port": 0,
    }
    process = await Process.start("gateway.front", **flags, **{f"gateway.{k}": v for k, v in gateway.items()})
    try:
        where = f"http://{process.ready['gateway']}"
        async with httpx.AsyncClient(base_url=where, timeout=LIMIT_S, verify=False) as http:
            async with asyncio.timeout(LIMIT_S):
                while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110 - as a load balancer does
                    await asyncio.sleep(0.01)
            yield process, http
    finally:
        await process.end()


@pytest.fixture
async def pods(cluster: Cluster) -> Cluster:
    """One of each role, slow enough for something to happen in mid-answer."""
    for role in ("prefill", "decode"):
        await cluster.start(role, fake_step_s=0.003)
    return cluster


async def test_router_and_gateway_serve_on_addresses_of_their_own(pods: Cluster) -> None:
    async with front(pods) as (process, http), RouterClient(process.ready["router"]) as router:
        request = long_running(5, 30)
        body = {"prompt": list(request.tokens.token_ids), "max_tokens": 8, "temperature": 0}
        by_http, by_grpc = await asyncio.gather(http.post("/v1/completions", json=body), collect(router, request))
        assert by_http.status_code == 200
        assert_right(by_grpc, request)
        ledger = await router.timeline(by_http.headers["x-pdserve-request-id"])
        assert ledger.outcome in ("stop", "length")
        page = (await http.get(f"http://{process.ready['metrics']}/metrics")).text
        assert 'pdserve_router_pods{role="decode",state="ready"} 1.0' in page
        assert "pdserve_gateway_requests" in (await http.get("/metrics")).text


async def test_answers_finish_on_sigterm(pods: Cluster) -> None:
    async with front(pods) as (process, http), http.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        process.send(signal.SIGTERM)
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(process.process.wait(), LIMIT_S) == 0


async def test_an_answer_past_the_drain_time_ends_with_its_error(pods: Cluster) -> None:
    async with front(pods, **{"drain-timeout-s": 0}) as (process, http):
        async with http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert '"code":"stopping"' in rest[-1]
        assert await asyncio.wait_for(process.process.wait(), LIMIT_S) == 0


async def test_one_that_was_killed_leaves_nothing_on_the_pods(pods: Cluster) -> None:
    async with front(pods) as (process, http):
        async with http.stream("POST", "/v1/completions", json=LONG) as answer:
            await anext(answer.aiter_bytes())
            process.send(signal.SIGKILL)
            await process.process.wait()
        await pods.assert_idle()


async def test_a_client_that_leaves_frees_the_pods(pods: Cluster) -> None:
    async with front(pods) as (_, http):
        async with http.stream("POST", "/v1/completions", json=LONG) as answer:
            await anext(answer.aiter_lines())
        await pods.assert_idle()


def test_each_part_has_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("router: {max_waiting: 7}\ngateway: {max_body_bytes: 1000, router: '127.0.0.1:1'}\n")
    argv = ["--router.model", "fake", "--config", str(file), "--gateway.port=9000", "--router.queue-wait-s", "2"]
    settings = FrontSettings.load(argv)
    assert (settings.router.model, settings.router.max_waiting, settings.router.queue_wait_s) == ("fake", 7, 2.0)
    assert (settings.gateway.port, settings.gateway.max_body_bytes) == (9000, 1000)


WRONG = {
    "router: setting 'model' is required": [],
    "router: setting 'port' = '70000'": ["--router.model", "fake", "--router.port", "70000"],
    "gateway: setting 'max_body_bytes' = '0'": ["--router.model", "fake", "--gateway.max-body-bytes", "0"],
    "--port: options are --router.OPTION, --gateway.OPTION and --config": ["--port", "1"],
    "'1' belongs to no option": ["1"],
    "--gateway.router: the router is in this process": ["--gateway.router", "127.0.0.1:1"],
    "both 8000: must differ": ["--router.model", "fake", "--router.port", "8000"],
}


@pytest.mark.parametrize(("words", "argv"), WRONG.items())
def test_a_wrong_setting_is_named(words: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        FrontSettings.load(argv)
    assert words in str(refused.value)


async def refusal(*flags: str) -> str:
    """What is said when it does not start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.front", "--router.model", "fake", *flags,
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert (process.returncode, out) == (2, b"")
    return err.decode()


@pytest.mark.parametrize("part", ["router", "gateway"])
async def test_a_taken_port_is_one_clear_line(part: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {"router": "--gateway.port", "gateway": "--router.port"}[part]
        said = await refusal(f"--{part}.port", str(port), free, "0")
    assert said.splitlines()[-1].startswith(f"front: cannot listen on 127.0.0.1:{port}: ")
    assert "Traceback" not in said


async def test_starts_without_torch() -> None:
    check = "import sys, gateway.front; print(sorted({'torch', 'transformers', 'engine'} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", check, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert out.decode().strip() == "[]"
