from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kernels.emulated import __main__ as emulated


def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["emulated", "--root", str(tmp_path)])
    assert emulated.main() == 1
    assert f"{tmp_path}/usr/bin/bochs-bin does not exist: install what" in capsys.readouterr().err


@pytest.mark.parametrize(("last", "status"), [("all right", 0), ("failed", 1)])
def test_a_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch, last: str, status: int) -> None:
    monkeypatch.setattr(sys, "argv", ["emulated"])
    monkeypatch.setattr(emulated, "emulate", lambda root, timeout_s: f"ok    amx linear\n{last}\nthe end\n")
    assert emulated.main() == status
