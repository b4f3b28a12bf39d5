"""Reading of --cores, and that all threads of a pod stay on theirs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pod.cores import format_cores, parse_cores
from pod.settings import PodSettings
from proto.settings import ConfigError

CORE = min(os.sched_getaffinity(0))

PINNED = f"""
import os, threading
from pod.cores import pin
stop = threading.Event()
before = threading.Thread(target=stop.wait)
before.start()
pin([{CORE}])
after = threading.Thread(target=stop.wait)
after.start()
print({{tuple(os.sched_getaffinity(t.native_id)) for t in (threading.main_thread(), before, after)}})
stop.set()
"""


@pytest.mark.parametrize(
    ("text", "cores"), [("", set()), ("3", {3}), ("0-2,5", {0, 1, 2, 5}), ("5, 1-1", {1, 5}), ("1,0,1", {0, 1})]
)
def test_cores_are_read(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["-", "1-", "2-1", "a", "1,,2", "-1", "0x1", "1 2", "123456"])
def test_what_is_no_core_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"setting 'cores' = '{text}': '.*' must be a core or an ascending range"):
        PodSettings.load([f"--cores={text}"])


@pytest.mark.parametrize("text", ["", "0", "0-1", "0-2,4,6-9"])
def test_formatting_is_the_inverse_of_reading(text: str) -> None:
    assert format_cores(parse_cores(text)) == text
    assert PodSettings.load([f"--cores={text}"]).cores == text


def test_every_thread_is_pinned_whenever_it_started() -> None:
    result = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"{{({CORE},)}}"
