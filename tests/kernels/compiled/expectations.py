"""What the machine code of each kernel has to show, whatever the table of the last run says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.kernels.compiled.configurations import Configuration
from tests.kernels.compiled.machine_code import Figures
from tests.kernels.compiled.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """matrix: "tile" wants the unit for tiles of 64 rows (wgmma on sm_90), "any" any matrix instruction; both only in
    configurations whose dtype has one. wide_share: of the loaded bytes, at least this share by wide loads.
    """

    matrix: Literal["none", "any", "tile"] = "none"
    wide_share: float = 0.0


# A kernel that is not here fails the check. Loads of block tables, slots and angles are scalars or short rows.
EXPECTED = {
    "prefill_kernel": Expectation(matrix="tile", wide_share=0.80),
    "decode_split_kernel": Expectation(matrix="any", wide_share=0.75),
    "decode_merge_kernel": Expectation(),  # its input is a hundredth of what attention reads
    "quantized_linear_kernel": Expectation(matrix="any", wide_share=0.80),
    "copy_rows_kernel": Expectation(wide_share=0.75),
    "kv_write_kernel": Expectation(wide_share=0.75),
    "rms_norm_kernel": Expectation(wide_share=0.95),
    "rope_kernel": Expectation(wide_share=0.60),
    "silu_mul_kernel": Expectation(wide_share=0.95),
    "gelu_mul_kernel": Expectation(wide_share=0.95),
    "filter_kernel": Expectation(wide_share=0.85),
    "draw_kernel": Expectation(wide_share=0.85),
}


def broken(target: Target, kernel: str, configuration: Configuration, figures: Figures) -> Iterator[str]:
    """What `figures` of `kernel` on `target` break, each with the figure and its limit."""
    expected = EXPECTED.get(kernel)
    if expected is None:
        yield "has no entry in tests/kernels/compiled/expectations.py: say what its machine code has to show"
        return
    if figures.spill_bytes > target.spill_bytes:
        yield f"spilled bytes = {figures.spill_bytes}, at most {target.spill_bytes}"
    if figures.shared_bytes > target.shared_bytes:
        yield f"shared bytes = {figures.shared_bytes}, at most {target.shared_bytes}"
    if figures.wide_share < expected.wide_share and configuration.narrow_because is None:
        yield f"wide loads = {figures.wide_share:.0%} of the bytes, at least {expected.wide_share:.0%}"
    if configuration.matrix and expected.matrix == "any" and figures.matrix == "none":
        yield "matrix = none, expected instructions of a matrix unit"
    if configuration.matrix and expected.matrix == "tile" and figures.matrix != target.tile_matrix:
        yield f"matrix = {figures.matrix}, expected {target.tile_matrix}"
