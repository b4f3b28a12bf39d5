"""What a quantised cache must store, worked out in another way than the kernels do: numpy, and fp8 by its table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_cache import QUANTISED_DTYPES, PagedKV

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _fp8_values() -> Floats:
    """Of the codes 0x00 .. 0x7e of e4m3: 2^-9 steps below 2^-6, then 8 steps an exponent."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return values.astype(np.float32)


FP8_VALUES = _fp8_values()


def fp8_codes(values: Floats) -> Bytes:
    """The nearest code of each value; between two, the even one."""
    distance = np.abs(np.abs(values).astype(np.float64)[..., None] - FP8_VALUES.astype(np.float64))
    even_first = np.argsort(np.arange(0x7F) % 2, kind="stable")
    nearest = even_first[distance[..., even_first].argmin(-1)]
    codes: Bytes = (nearest | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return codes


def expected_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[Bytes, Floats]:
    """Stored bytes [*, D] and scales [*] of rows [*, D]."""
    x, limit = rows.float().numpy(), np.float32(QUANTISED_DTYPES[dtype])
    peak = np.abs(x).max(-1)
    with np.errstate(all="ignore"):
        scaled = x * (limit / peak)[..., None]
        scales = np.where(peak >= 2.0**-100, peak / limit, np.float32(0))
    scaled[~(peak >= 2.0**-100) | ~np.isfinite(peak)] = 0
    scales[~np.isfinite(peak)] = np.nan
    scaled = scaled.clip(-limit, limit)
    return np.rint(scaled).astype(np.int8).view(np.uint8) if dtype == torch.int8 else fp8_codes(scaled), scales


def quantised_cache(num_blocks: int, heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> PagedKV:
    """One of two layers of a block-major cache, of NaN scales."""
    slots = (num_blocks, 2, 2, heads, block_size)
    stored = torch.full((*slots, head_dim), 85.0).to(dtype)
    scales = torch.full(slots, torch.nan)
    return PagedKV(stored[:, 1, 0], stored[:, 1, 1], scales[:, 1, 0], scales[:, 1, 1])


def bytes_of(cache: torch.Tensor) -> Bytes:
    return cache.contiguous().view(torch.uint8).numpy()
