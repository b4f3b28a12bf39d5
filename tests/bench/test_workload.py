"""Equal prompts for every server, none a prefix of another; memory and log lines as the peers write them."""

from __future__ import annotations

import json
import os

import pytest

from bench.engine.bench_engine import parse
from bench.engine.llama_cpp import kv_bytes
from bench.engine.memory import Resident, parse_rollup, resident
from bench.engine.vllm_proxy import decode_body, prefill_body
from bench.engine.workload import requests


def test_prompts_are_the_same_for_every_server() -> None:
    assert requests("a", 1, 3, 16, 8) == requests("a", 1, 3, 16, 8)


def test_prompts_share_no_prefix() -> None:
    drawn = [r.prompt for case in "ab" for number in range(3) for r in requests(case, number, 4, 64, 8)]
    assert len({prompt[:16] for prompt in drawn}) == len(drawn)
    assert {len(prompt) for prompt in drawn} == {64}


def test_the_body_asks_for_a_fixed_length_and_the_usage() -> None:
    (request,) = requests("a", 0, 1, 4, 7)
    body = json.loads(request.body("m"))
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", list(request.prompt), 7)
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_resident_memory_is_read() -> None:
    assert parse_rollup("0-1 ---p 0 0:0 0 [rollup]\nRss:    10 kB\nPss:     4 kB\n") == Resident(10240, 4096)
    mine = resident([os.getpid(), 2**22 + 1])  # the second is above every pid
    assert mine.rss >= mine.pss > 1 << 20


def test_llama_cpp_says_its_kv_pool() -> None:
    log = "x: CPU KV buffer size =  1800.00 MiB\ny: CPU KV buffer size =   0.50 MiB\n"
    assert kv_bytes(log) == 1800.5 * 2**20


def test_the_proxy_asks_for_one_token_and_hands_its_kv_on() -> None:
    body = {"prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    asked = prefill_body(body)
    assert (asked["max_tokens"], asked["stream"], "stream_options" in asked) == (1, False, False)
    assert asked["kv_transfer_params"]["do_remote_decode"]
    assert decode_body(body, {"kv_transfer_params": {"a": 1}}) == {**body, "kv_transfer_params": {"a": 1}}
    with pytest.raises(ValueError, match="no kv_transfer_params"):
        decode_body(body, {"kv_transfer_params": None})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--only=singel", "singel: must be of single, eight"),
        ("--arms=ours,vlm", "vlm: must be of ours, "),
        ("--rounds=0", "--rounds: 0: must be a whole number, at least 1"),
        ("--peers=/nowhere/at/all", "no such directory; make bench-peers"),
    ],
)
def test_bad_options_are_named(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse([argument])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
