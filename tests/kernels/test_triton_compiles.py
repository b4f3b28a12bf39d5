from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_compiler_accepts_every_kernel() -> None:
    """For Hopper; tests/kernels/triton_compile.py knows more targets.

    In a process of its own, because it fakes the driver.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_compile", "90"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("sm_90")}
    assert {"decode_split_kernel", "prefill_kernel", "kv_write_kernel", "filter_kernel", "draw_kernel"} <= compiled
