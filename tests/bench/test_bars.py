"""Verdicts, lines and result files of bench/bars.py, and that no benchmark has its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.bars import Bar, Op, report

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("op", "value", "verdict"),
    [
        (">=", 2.0, "PASS"),
        (">=", 1.9, "FAIL"),
        (">=", 2.1, "PASS"),
        ("<=", 2.0, "PASS"),
        ("<=", 2.1, "FAIL"),
        ("<=", 1.9, "PASS"),
    ],
)
def test_verdicts(op: Op, value: float, verdict: str) -> None:
    bar = Bar("b", (value,), op, 2.0)
    assert bar.verdict == verdict
    assert bar.line() == f"BAR b {value:.3f} {op} 2.00 {verdict}"


def test_the_value_is_the_median_over_rounds() -> None:
    assert Bar("b", (2.0, 9.0, 3.0), ">=", 2.5).line() == "BAR b 3.000 >= 2.50 PASS (2.000..9.000 of 3)"


def test_what_was_not_measured_says_why() -> None:
    bar = Bar("b", (), "<=", 2.0, "no GPU")
    assert (bar.median, bar.verdict) == (None, "NOT-RUN")
    assert bar.line() == "BAR b - <= 2.00 NOT-RUN (no GPU)"


def test_a_bar_without_a_threshold_informs() -> None:
    assert Bar("b", (1.5,)).line() == "BAR b 1.500 - - INFO"


def test_what_is_printed_is_stored_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bars = [Bar("a", (1.0, 3.0), ">=", 2.0), Bar("b", (), "<=", 0.5, "no GPU")]
    report(bars, tmp_path / "results.json", threads=2)
    assert capsys.readouterr().out.splitlines() == [bar.line() for bar in bars]
    assert json.loads((tmp_path / "results.json").read_text()) == {
        "bars": [
            {
                "name": "a",
                "value": 2.0,
                "values": [1.0, 3.0],
                "op": ">=",
                "threshold": 2.0,
                "verdict": "PASS",
                "why_not": "",
            },
            {
                "name": "b",
                "value": None,
                "values": [],
                "op": "<=",
                "threshold": 0.5,
                "verdict": "NOT-RUN",
                "why_not": "no GPU",
            },
        ],
        "threads": 2,
    }


def test_without_a_file_nothing_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    report([Bar("a", (1.0,))], None)
    assert capsys.readouterr().out == "BAR a 1.000 - - INFO\n"


@pytest.mark.parametrize("file", sorted(BENCH.rglob("*.py")), ids=lambda file: file.relative_to(BENCH).as_posix())
def test_bars_are_told_and_stored_in_one_place(file: Path) -> None:
    source = file.read_text()
    assert (re.search(r'f"BAR |write_text\(json', source) is not None) == (file == BENCH / "bars.py")
    if re.search(r"^ +report\w*\(.*arguments", source, re.MULTILINE):
        assert '"--json", type=new_file' in source
