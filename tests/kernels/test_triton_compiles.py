from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_machine_code_is_as_the_table_says() -> None:
    """The part of `make compile-table` that fits into a test run, in processes of their own: they fake the driver."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_compile", "--quick", "sm_90", "sm_80", "gfx942"],
        cwd=Path(__file__).parents[2],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = {line.split(" | ")[1] for line in result.stdout.splitlines() if line.startswith("| sm_90 ")}
    assert {"decode_split_kernel", "prefill_kernel", "kv_write_kernel", "filter_kernel", "draw_kernel"} <= compiled
