"""Every benchmark answers a bad argument with one line that names the option, and exit status 2, before it measures."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

BENCH = Path(__file__).parents[2] / "bench"
OPTION = re.compile(r'add_argument\("(--[a-z-]+)", type=(\w+)')
NUMBERS = {
    file: [option for option, kind in OPTION.findall(file.read_text()) if kind == "positive"]
    for file in sorted(BENCH.rglob("*.py"))
}


def name(file: Path) -> str:
    return file.relative_to(BENCH).with_suffix("").as_posix()


def run(file: Path, *arguments: str) -> object:
    """The exit status of the file as a program; what only peers' environments have is a stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *arguments])
        patch.setitem(sys.modules, "transformers", mock.MagicMock())  # this key alone: torch must stay, once imported
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(file), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
@pytest.mark.parametrize(
    ("file", "option"),
    [pytest.param(file, option, id=f"{name(file)}{option}") for file, options in NUMBERS.items() for option in options],
)
def test_a_count_is_a_whole_number_of_at_least_one(
    file: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, f"{option}={value}") == 2
    assert f"error: argument {option}: {value}: must be a whole number, at least 1" in capsys.readouterr().err


def test_benchmarks_with_rounds_and_threads_are_among_them() -> None:
    assert sum("--rounds" in options for options in NUMBERS.values()) >= 8
    assert sum("--threads" in options for options in NUMBERS.values()) >= 7


def test_no_count_may_be_any_integer() -> None:
    assert [name(file) for file in NUMBERS if "type=int" in file.read_text()] == []


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=name(file)) for file in NUMBERS if '"--json", type=' in file.read_text()],
)
def test_results_go_to_a_directory_that_exists(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--json", str(tmp_path / "nosuch" / "results.json")) == 2
    assert "error: argument --json: " in capsys.readouterr().err


@pytest.mark.parametrize("module", ["engine/perplexity.py", "engine/bench_speculation.py"])
def test_an_unknown_model_is_an_error_in_one_line(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH / module, "--model", "nosuch") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model 'nosuch': ")
    assert error.count("\n") == 1
