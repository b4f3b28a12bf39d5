"""The GPUs that kernels are compiled for, and what their chips allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triton.backends.compiler import GPUTarget

Matrix = Literal["none", "mma", "wgmma", "tcgen05", "mfma"]  # instructions of matrix units, as the vendors call them


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """shared_bytes: what one program may use (Triton does not check it). tile_matrix: the unit for tiles of 64 rows.

    spill_bytes: thread-private memory that is tolerated. backend, arch, warp_size: as Triton's GPUTarget has them.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    tile_matrix: Matrix
    spill_bytes: int = 0

    @property
    def triton(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.warp_size)


def _nvidia(arch: int, shared_kib: int, tile_matrix: Matrix, spill_bytes: int = 0) -> Target:
    return Target(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        shared_bytes=shared_kib * 1024,
        tile_matrix=tile_matrix,
        spill_bytes=spill_bytes,
    )


_ALL = (
    _nvidia(80, 163, "mma", spill_bytes=32),  # A100
    _nvidia(89, 99, "mma", spill_bytes=32),  # L4, L40, RTX 4090
    _nvidia(90, 227, "wgmma"),  # H100, H200
    _nvidia(100, 227, "tcgen05"),  # B200
    _nvidia(120, 99, "mma", spill_bytes=64),  # RTX 5090
    Target(name="gfx942", backend="hip", arch="gfx942", warp_size=64, shared_bytes=65536, tile_matrix="mfma"),  # MI300
)
TARGETS = {target.name: target for target in _ALL}
