from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.dispatch import implementation
from kernels.gates import silu_mul


@pytest.mark.parametrize(
    ("dtype", "folder"),
    [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float16, "reference"), (torch.float64, "reference")],
)
def test_cpu_tensors_go_to_the_compiled_kernels_where_they_have_the_dtype(dtype: torch.dtype, folder: str) -> None:
    chosen = implementation("gates", "silu_mul", torch.zeros(1, dtype=dtype), None)
    assert chosen.__module__ == f"kernels.{folder}.gates"


def test_other_devices() -> None:
    assert dispatch.default_backend("cuda", torch.float16) == "triton"
    assert dispatch.default_backend("mps", torch.float32) == "reference"


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend='numpy' is not one of reference, cpu, triton"):
        silu_mul(torch.zeros(1, 2), backend="numpy")  # type: ignore[arg-type]  # the point of the test


def test_a_dtype_that_the_compiled_kernels_lack_is_named() -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16 on the CPU, got torch.float16 on cpu"):
        silu_mul(torch.zeros(1, 2, dtype=torch.float16), backend="cpu")


def test_float16_on_a_cpu_still_computes() -> None:
    out = silu_mul(torch.tensor([[1.0, 2.0]], dtype=torch.float16))
    assert out.item() == pytest.approx(2 / (1 + torch.e**-1), rel=1e-3)


def test_a_machine_without_a_compiler_computes_with_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from kernels.cpu.library import library

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library.cache_clear()
    dispatch._cpu_library_loads.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            chosen = [implementation("rope", "rope", torch.zeros(1), None) for _ in range(2)]
    finally:
        dispatch._cpu_library_loads.cache_clear()
    assert {function.__module__ for function in chosen} == {"kernels.reference.rope"}
    assert len(caplog.messages) == 1
    assert "Install one" in caplog.messages[0]


def test_importing_the_ops_imports_neither_triton_nor_the_library() -> None:
    ops = "block_copy, gates, kv_write, linear, paged_decode, paged_prefill, rms_norm, rope, sampling"
    heavy = ("triton", "kernels.cpu.library")
    source = f"from kernels import {ops}; import sys; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", source]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
