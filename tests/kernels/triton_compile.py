"""Compiles every Triton kernel for GPUs that are not here: `python -m tests.kernels.triton_compile CAPABILITY...`.

The interpreter accepts what the compiler refuses. A driver that only names its target lets the real launchers run on
CPU tensors; each launch compiles, specialised as on the device, and is not run. Prints one line a kernel and target
with its shared memory; a kernel that the compiler refuses, or that wants more shared memory than the target has, ends
it with 1.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import gelu_mul, kv_write, paged_decode, paged_prefill, rms_norm, rope, sampling, silu_mul
from kernels.kv_cache import PagedKV

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


class CompileOnlyDriver:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability  # also our device number: Triton keeps what it compiled by device
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def run_attention(dtype: torch.dtype, head_dim: int) -> None:
    """Calls both attention ops; what they compute is not looked at."""
    cache = torch.zeros(8, 1, 2, 3, 16, head_dim, dtype=dtype)
    kv = PagedKV(cache[:, 0, 0], cache[:, 0, 1])
    q = torch.zeros(4, 9, head_dim, dtype=dtype)
    tables, lengths = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32)
    for window, cap in ((None, None), (20, None), (None, 50.0)):
        paged_decode.paged_decode(*(q, kv, tables, lengths, 0.1), sliding_window=window, soft_cap=cap, backend="triton")
        paged_prefill.paged_prefill(
            *(q, kv, tables, starts, lengths, 0.1), sliding_window=window, soft_cap=cap, backend="triton"
        )


def run_other_ops(dtype: torch.dtype, head_dim: int) -> None:
    """Calls every other op that has a Triton implementation."""
    cache = torch.zeros(8, 1, 2, 3, 16, head_dim, dtype=dtype)
    q, k = torch.zeros(4, 9, head_dim, dtype=dtype), torch.zeros(4, 3, head_dim, dtype=dtype)
    slots, angles = torch.zeros(4, dtype=torch.int64), torch.zeros(32, head_dim // 2)
    x, weight = torch.zeros(4, 576, dtype=dtype), torch.zeros(576, dtype=dtype)
    kv_write.kv_write(k, k, PagedKV(cache[:, 0, 0], cache[:, 0, 1]), slots, backend="triton")
    rms_norm.rms_norm(x, weight, 1e-5, backend="triton")
    rms_norm.fused_add_rms_norm(x, x, weight, 1e-5, backend="triton")
    rope.rope(q, k, slots, angles, angles, backend="triton")
    silu_mul.silu_mul(x, backend="triton")
    gelu_mul.gelu_mul(x, backend="triton")
    logits = torch.zeros(2, 49_152)
    sampling.filter_logits(logits, [5, 0], [0.9, 0.5], [0.0, 0.1], backend="triton")
    sampling.draw(logits.softmax(-1), [0.1, 0.2], backend="triton")


def compile_for(capability: int) -> list[str]:
    """One line a compiled launch; the offending ones begin with TOO LARGE."""
    lines = []
    stock_run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = stock_run(self, *args, grid=grid, warmup=True, **options)
        shared = compiled.metadata.shared
        verdict = "" if shared <= SHARED_BYTES[capability] else "TOO LARGE "
        lines.append(f"{verdict}sm_{capability} {self.fn.__name__} {shared} bytes shared")

    driver.set_active(CompileOnlyDriver(capability))
    JITFunction.run = compile_only
    try:
        for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 128)):
            run_attention(dtype, head_dim)
        run_other_ops(torch.bfloat16, head_dim=128)
    finally:
        JITFunction.run = stock_run
    return lines


def main() -> int:
    torch.set_num_threads(1)
    lines = [line for capability in sys.argv[1:] for line in compile_for(int(capability))]
    print("\n".join(lines))
    return int(any(line.startswith("TOO LARGE") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
