"""Weights that a checkpoint has in 4 or 8 bits already, in our order of memory: the same integers, the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.config_fields import CheckpointError
from engine.quantization import BLOCKS_SUFFIX, GPTQ_SUFFIX, StoredQuantization
from engine.quantize import half_scales
from kernels.quantized import QuantizedMatrix, pack

Read = Callable[[str], torch.Tensor]  # a tensor by its name

WIDEST_GROUP = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output 8 * word + _AWQ_ORDER[i]
_BLOCK = 32  # weights of a GGUF block


def stored_names(names: Mapping[str, object], stored: StoredQuantization) -> list[str]:
    """Linears that are quantised, without suffix."""
    suffix = BLOCKS_SUFFIX if stored.method == "gguf" else GPTQ_SUFFIX
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def read_stored(
    name: str, read: Read, names: Mapping[str, object], stored: StoredQuantization
) -> QuantizedMatrix | torch.Tensor:
    """A tensor, float32 [N, K], where the groups are no runs of columns.

    Raises CheckpointError when the tensors of linear `name` do not fit together or cannot be computed.
    """
    try:
        if stored.method == "gguf":
            return gguf_matrix(read(name + BLOCKS_SUFFIX))
        qweight, qzeros, scales = (read(f"{name}.{kind}") for kind in ("qweight", "qzeros", "scales"))
        if stored.method == "awq":
            return awq_matrix(qweight, qzeros, scales, stored)
        g_idx = read(f"{name}.g_idx") if f"{name}.g_idx" in names else None
        return gptq_matrix(qweight, qzeros, scales, g_idx, stored)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{name}: {error}") from None


def awq_matrix(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, stored: StoredQuantization
) -> QuantizedMatrix:
    """AutoAWQ's GEMM layout. qweight: int32 [K, N/8]; qzeros: int32 [G, N/8]; scales [G, N]."""
    inverse_order = torch.tensor(_AWQ_ORDER).argsort()
    levels, zeros = (_unpacked(t, 4)[..., inverse_order].flatten(1).T for t in (qweight, qzeros))
    return _from_zeros(levels, zeros, scales.T, stored)


def gptq_matrix(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    stored: StoredQuantization,
) -> QuantizedMatrix | torch.Tensor:
    """qweight: int32 [K * bits / 32, N]; qzeros: int32 [G, N * bits / 32]; scales [G, N]; g_idx: [K], or none.

    Columns that were quantised in the order of their activations (desc_act) have their groups scattered over the row:
    such a matrix becomes its values, float32 [N, K]. Raises ValueError for what does not fit together.
    """
    levels = _unpacked(qweight.T, stored.bits).flatten(1)
    ones = sum(1 << shift for shift in range(0, 32, stored.bits))
    zeros = _unpacked(qzeros + stored.zero_offset * ones, stored.bits).flatten(1).T
    columns = levels.shape[1]
    if g_idx is None or torch.equal(g_idx.long(), torch.arange(columns) // (stored.group_size or columns)):
        return _from_zeros(levels, zeros, scales.T, stored)
    _check_groups(levels, zeros, scales.T, stored)
    return _spread(levels, zeros, scales.T, g_idx.long())


def gguf_matrix(blocks: torch.Tensor) -> QuantizedMatrix:
    """blocks: uint8 [N, blocks, bytes], of Q4_0, Q4_1 or Q8_0, which a block's size tells apart. Raises ValueError."""
    rows, num_blocks, size = blocks.shape
    scales = blocks[..., :2].contiguous().view(torch.float16).view(rows, num_blocks)
    if size == 2 + _BLOCK:  # Q8_0: scale, int8
        levels = blocks[..., 2:].contiguous().view(torch.int8).view(rows, -1)
        return pack(levels, bits=8, scales=scales)
    if size not in (2 + _BLOCK // 2, 4 + _BLOCK // 2):
        raise ValueError(f"blocks of {size} bytes: only Q4_0, Q4_1 and Q8_0 are supported")
    nibbles = blocks[..., -_BLOCK // 2 :]  # low halves are the block's first 16 weights, high ones the others
    levels = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).view(rows, -1)
    if size == 2 + _BLOCK // 2:  # Q4_0: scale
        return pack(levels, bits=4, scales=scales)
    offsets = blocks[..., 2:4].contiguous().view(torch.float16).view(rows, num_blocks)  # Q4_1: scale, offset
    return pack(levels, bits=4, scales=scales, offsets=offsets)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, B] -> [A, B, 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return torch.bitwise_and(words[..., None] >> shifts, 2**bits - 1)


def _from_zeros(
    levels: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, stored: StoredQuantization
) -> QuantizedMatrix:
    """levels: [N, K], unsigned; zeros, scales: [N, G]. A weight is scale * (level - zero)."""
    columns, group = levels.shape[1], stored.group_size or levels.shape[1]
    _check_groups(levels, zeros, scales, stored)
    if group > WIDEST_GROUP or group == columns:
        zeros, scales = (_repeated(values, columns, group) for values in (zeros, scales))
    exact, row_scales = (scales, None) if scales.dtype == torch.float16 else half_scales(scales.float())
    middle = 2 ** (stored.bits - 1)
    signed = levels - middle if stored.bits == 8 else levels
    lacking = zeros - middle if stored.bits == 8 else zeros
    symmetric = bool((zeros == middle).all())
    offsets = None if symmetric else -exact.float() * lacking
    return pack(signed, bits=stored.bits, row_scales=row_scales, scales=exact, offsets=offsets)


def _spread(levels: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Values, float32 [N, K]. groups: [K], that of each column.

    Exact for float16 scales: 11 bits times at most 9 fit float32's 24, but not bfloat16's 8.
    """
    columns, num_groups = levels.shape[1], scales.shape[1]
    if groups.shape != (columns,) or int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ValueError(
            f"g_idx {tuple(groups.shape)} from {int(groups.min())} to {int(groups.max())}: must have a group from 0 to "
            f"{num_groups - 1} for each of {columns} columns"
        )
    return scales.float()[:, groups] * (levels - zeros[:, groups])


def _check_groups(levels: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, stored: StoredQuantization) -> None:
    """Raises ValueError unless every group of every row has a scale and a zero point."""
    columns, group = levels.shape[1], stored.group_size or levels.shape[1]
    if zeros.shape != scales.shape or scales.shape != (levels.shape[0], -(-columns // group)):
        raise ValueError(
            f"scales {tuple(scales.shape)} and zero points {tuple(zeros.shape)} do not fit weights "
            f"{tuple(levels.shape)} in groups of {group}"
        )


def _repeated(values: torch.Tensor, columns: int, group: int) -> torch.Tensor:
    """[N, G] of wide groups as [N, ceil(columns / WIDEST_GROUP)]."""
    firsts = torch.arange(0, columns, WIDEST_GROUP)
    return values[:, firsts // group]
