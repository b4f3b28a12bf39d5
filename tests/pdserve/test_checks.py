"""Each check, where it passes and where it says what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdserve import checks
from pdserve.checks import GIB, Check, LaunchError


def test_require_raises_the_first_problem_as_one_line() -> None:
    with pytest.raises(LaunchError, match=r"^memory: too little: buy more$"):
        checks.require(Check("python", "3.11"), Check("memory", "too little", "buy more"), Check("x", "y", "z"))


def test_this_environment_is_fit() -> None:
    checks.require(
        checks.check_python(), checks.check_names(), checks.check_shared_memory(), checks.check_registry_binary()
    )


def test_a_taken_port_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = checks.check_port("port", "127.0.0.1", port, "--port")
    assert not check.ok
    assert f"127.0.0.1:{port} is taken" in check.detail
    assert "--port" in check.advice
    assert checks.check_port("port", "127.0.0.1", port, "--port").ok


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    check = checks.check_port("port", "192.0.2.1", 8000, "--port")
    assert not check.ok
    assert "cannot listen on 192.0.2.1:8000" in check.detail


def test_compiler_is_looked_for_under_its_usual_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    found = {"clang++": "/usr/bin/clang++"}
    assert checks.check_compiler(found.get).detail == "/usr/bin/clang++"
    missing = checks.check_compiler(lambda _: None)
    assert "install g++" in missing.advice
    monkeypatch.setenv("CXX", "mycc")
    assert "no mycc" in checks.check_compiler(found.get).detail


def test_memory() -> None:
    assert checks.check_memory(2 * GIB, 3 * GIB, "2 pods").ok
    check = checks.check_memory(4 * GIB, 3 * GIB, "2 pods")
    assert check.detail == "3.0 GiB are free, 2 pods need about 4.0 GiB"
    assert "--kv-memory" in check.advice


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    machine = checks.available_memory_bytes(cgroup=tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert checks.available_memory_bytes(cgroup=tmp_path) == 600_000 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert checks.available_memory_bytes(cgroup=tmp_path) > 600_000


def test_cpu_flags_are_told() -> None:
    assert "avx2" in checks.check_cpu("processor: 0\nflags : fpu avx2 avx512f\n").detail
    assert "no vector extensions" in checks.check_cpu("").detail


def test_registry_that_does_not_answer() -> None:
    check = checks.check_registry("redis://127.0.0.1:1/0")
    assert not check.ok
    assert "redis://127.0.0.1:1/0 does not answer" in check.detail
    assert not checks.check_registry("http://x").ok


def test_registry_that_answers(registry_url: str) -> None:
    assert checks.check_registry(registry_url).ok
