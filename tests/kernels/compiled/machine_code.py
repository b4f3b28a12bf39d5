"""What the machine code of a compiled kernel shows: registers, spills, memory, matrix instructions, widths of loads."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

from tests.kernels.compiled.targets import Matrix

WIDE_BYTES = 512  # of one instruction of a warp: 16 bytes for each of 32 lanes, 8 for each of AMD's 64

# The strongest first: a kernel that uses several is named by its first.
_NVIDIA_MATRIX: tuple[tuple[Matrix, str], ...] = (
    ("tcgen05", r"\bUTC\w*MMA\b"),
    ("wgmma", r"\b[HQI]GMMA\b"),
    ("mma", r"\b[HQIO]MMA\b"),
)
_NVIDIA_LOAD = re.compile(r"\bLDG(?:STS)?((?:\.\w+)*)\s")  # LDGSTS: asynchronous, into shared memory
_AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_AMD_LOAD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


@dataclass(frozen=True, slots=True)
class Figures:
    """registers: of a thread. spill_bytes: a thread's private memory, where registers that did not fit lie.

    wide_share: of the bytes that the load instructions fetch, the share that comes 512 bytes a warp (16 a lane, or 8
    of 64 lanes); 1 without loads.
    Instructions are counted as they stand, not as often as they run.
    """

    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: Matrix
    num_matrix: int
    wide_share: float


def figures(kernel: Any) -> Figures:
    """Of Triton's CompiledKernel. Runs the disassembler, half a second."""
    if "cubin" in kernel.asm:
        return _nvidia(kernel)
    return _amd(kernel)


def _nvidia(kernel: Any) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        code = _output(knobs.nvidia.nvdisasm.path, "--print-code", file.name)
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
    matrix, num_matrix = nvidia_matrix(code)
    return Figures(
        warps=kernel.metadata.num_warps,
        registers=_number(r"\bREG:(\d+)", usage),
        spill_bytes=_number(r"\bSTACK:(\d+)", usage),
        shared_bytes=kernel.metadata.shared,
        matrix=matrix,
        num_matrix=num_matrix,
        wide_share=wide_share([32 * nvidia_load_bytes(each) for each in _NVIDIA_LOAD.findall(code)]),
    )


def _amd(kernel: Any) -> Figures:
    code = kernel.asm["amdgcn"]
    num_matrix = len(re.findall(r"\bv_mfma_", code))
    return Figures(
        warps=kernel.metadata.num_warps,
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        spill_bytes=_number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        shared_bytes=kernel.metadata.shared,
        matrix="mfma" if num_matrix else "none",
        num_matrix=num_matrix,
        wide_share=wide_share([64 * _AMD_LOAD_BYTES.get(width, 2) for width in _AMD_LOAD.findall(code)]),
    )


def nvidia_matrix(code: str) -> tuple[Matrix, int]:
    """The strongest kind of matrix instruction in SASS, and how many of it stand there."""
    for kind, pattern in _NVIDIA_MATRIX:
        if found := len(re.findall(pattern, code)):
            return kind, found
    return "none", 0


def nvidia_load_bytes(modifiers: str) -> int:
    """Bytes a lane of a load with these modifiers, such as `.E.BYPASS.128`."""
    for modifier in modifiers.split("."):
        if modifier in {"64", "128", "256"}:
            return int(modifier) // 8
        if modifier in {"U8", "S8", "U16", "S16"}:
            return int(modifier[1:]) // 8
    return 4


def wide_share(sizes: list[int]) -> float:
    """sizes: bytes a warp of each load instruction."""
    return sum(size for size in sizes if size >= WIDE_BYTES) / sum(sizes) if sizes else 1.0


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern} is not in the tool's output: {text[:500]!r}")
    return int(found[1])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
