"""The command line: every wrong setting is one line that names it, and exit code 2."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from pdserve import doctor
from pdserve.__main__ import COMMANDS, main
from pdserve.checks import Check
from pdserve.settings import DoctorSettings
from pod.settings import PodSettings
from proto.inference_pb2 import Ledger
from proto.settings import SECTIONS, Settings
from router.client import RouterClient
from router.settings import RouterSettings


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve"], ["unknown command 'serve'", "up, demo"]),
        (["up", "--prefill", "-1"], ["'prefill'", "'-1'", "greater than or equal to 0"]),
        (["up", "--decode", "0"], ["'decode'", "greater than or equal to 1"]),
        (["up", "--port", "70000"], ["'port'", "'70000'", "65535"]),
        (["up", "--engine", "cuda"], ["'engine'", "'torch' or 'fake'"]),
        (["up", "--kv-memory", "much"], ["'kv_memory'", "'much'"]),
        (["up", "--config", "/no/such.yaml"], ["--config /no/such.yaml", "No such file"]),
        (["up", "--model", "no-such-model"], ["'no-such-model'", "known names"]),
        (["up", "--registry-url", "redis://127.0.0.1:1/0"], ["registry", "does not answer"]),
        (["up", "--engine", "fake", "--run-dir", "/tmp/" + "x" * 90], ["--run-dir", "at most"]),
        (["up", "--engine", "fake", "--run-dir", "/proc/x"], ["--run-dir /proc/x: ", "pass a"]),
        (["up", "--engine", "fake", "--run-dir", "/dev/null"], ["--run-dir /dev/null: File exists: pass a"]),
        (["demo", "--run-dir", "/proc"], ["--run-dir /proc: ", "pass a"]),
        (["up", "--model", ""], ["'model'", "at least 1 character"]),
        (["up", "--prefil", "1"], ["unrecognized arguments: --prefil 1", "--help"]),
        (["up", "--kv-dtype", "float16"], ["'kv_dtype'", "'float16'", "'auto', 'bf16', 'bfloat16', 'int8' or 'fp8'"]),
        (["up", "--kv-memory", "0"], ["'kv_memory'", "greater than 0"]),
        (["up", "--kv-memory", "-5MiB"], ["--kv-memory", "--help"]),
        (["up", "--engine", "fake", "--port", "9", "--router-port", "9"], ["--port and --router-port are both 9"]),
        (["up", "--colocated", "--prefill", "2"], ["colocated and prefill = 2: ", "give one of them"]),
        (["model", "no-such-model"], ["'no-such-model'", "known names"]),
        (["demo", "--prompt", ""], ["'prompt'", "at least 1 character"]),
    ],
)
def test_wrong_settings(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PDSERVE_PORT", "PDSERVE_ROUTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert captured.err.startswith("error: ")
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("podd: {block_size: 32}", ["unknown section 'podd'", "known are pdserve, pod, router"]),
        ("- 1\n- 2", ["mapping of sections"]),
        ("[]", ["pdserve.yaml: ", "mapping of sections"]),
        ("pdserve: 5", ["section 'pdserve'", "mapping of settings"]),
        ("pdserve: []", ["section 'pdserve'", "mapping of settings"]),
        ("pdserve:\n  decode: 1\n  decode: 2", ["pdserve.yaml: key 'decode' is there twice", "line 3"]),
        ("pdserve: {}\npod: {}\npdserve: {}", ["key 'pdserve' is there twice", "line 3"]),
        ("pdserve: {model: 2026-99-99}", ["month must be in 1..12"]),
        ("pdserve: [1,\n  2", ["expected ',' or ']'", "line 2"]),
        ("pdserve: {prefil: 2}", ["'prefil' = 2", "no such setting"]),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text(content)
    assert main(["up", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err


def test_sections_are_those_of_the_processes() -> None:
    loaded: set[type[Settings]] = {GatewaySettings, PodSettings, RouterSettings, *COMMANDS.values()}
    assert {cls.section for cls in loaded} == set(SECTIONS)


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert main(["up", "--engine", "fake", "--port", port]) == 2
    assert capsys.readouterr().err == (
        f"error: port: 127.0.0.1:{port} is taken: stop what listens there, or pass --port N (0: a free one)\n"
    )


def test_file_and_environment_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text("pdserve: {prefill: 3, decode: 4}\npod: {block_size: 32}\n")
    monkeypatch.setenv("PDSERVE_DECODE", "5")
    settings = COMMANDS["up"].load(["--config", str(file), "--no-colocated"])
    assert (settings.model_dump()["prefill"], settings.model_dump()["decode"]) == (3, 5)


def test_explain_without_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--router", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("error: no router answers at 127.0.0.1:1: start one")


@pytest.mark.parametrize("shown", ["chatcmpl-req-7", "cmpl-req-7", "req-7"])
def test_explain_takes_the_id_of_an_answer(
    shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def timeline(self: RouterClient, request_id: str = "") -> Ledger:
        asked.append(request_id)
        return Ledger(request_id=request_id)

    monkeypatch.setattr(RouterClient, "timeline", timeline)
    assert main(["explain", shown, "--router", "127.0.0.1:1"]) == 0
    assert asked == ["req-7"]
    assert "req-7" in capsys.readouterr().out


def test_doctor_says_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Check("python", "3.11.7"), Check("port", "taken", "free it")]
    monkeypatch.setattr(doctor, "machine_checks", lambda _: results)
    monkeypatch.setattr(doctor, "model_checks", lambda _: [])
    assert doctor.main(DoctorSettings.load([])) == 1
    assert capsys.readouterr().out.splitlines() == ["ok   python         3.11.7", "FAIL port           taken: free it"]


def test_doctor_checks_every_need() -> None:
    names = [check.name for check in doctor.machine_checks(DoctorSettings.load(["--port", "0", "--router-port", "0"]))]
    wanted = ["python", "import names", "compiler", "cpu", "shared memory", "registry", "port", "router port"]
    assert names == wanted


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "pdserve.settings":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["pdserve", "--help"]
runpy.run_module("pdserve", run_name="__main__")
"""


def test_ctrl_c_while_modules_are_imported_shows_no_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGINT
    assert (ended.stdout, ended.stderr) == ("", "")
