"""One layer's paged KV cache, as ops that read or write it take it: in the model's dtype, bfloat16, int8 or fp8.

A bfloat16 cache of a float32 model has its rows rounded to nearest, ties to even.
Quantised, each slot of each kv head has two scales, one for its K and one for its V: a row x [D] is stored as
round(x / scale) with scale = max |x| / QUANTISED_DTYPES[dtype]. So what a slot holds depends on its own token and on
nothing that was written before or after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import check_dtype, check_rows, check_shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# The largest value that each stores, which the largest element of a row becomes.
QUANTISED_DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# What each of these caches goes with; one of any other dtype goes with its own alone.
_COMPUTED_IN = {torch.bfloat16: (torch.bfloat16, torch.float32), **dict.fromkeys(QUANTISED_DTYPES, FLOATS)}

# A row whose elements are all smaller is stored as zeros: 1 / scale would leave float32.
SMALLEST_PEAK = 2.0**-100


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """K and V in blocks: [N, Hkv, block_size, D] each, of one dtype and of equal strides, any but the last.

    Of a quantised dtype there are scales, float32 [N, Hkv, block_size], of equal strides too, the last 1.
    Checked once, here, and used for every step. Raises ValueError or TypeError for shapes, strides and dtypes.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_shape("kv.k", self.k, (None, None, None, None))
        check_shape("kv.v", self.v, tuple(self.k.shape))
        check_dtype("kv.v", self.v, self.k.dtype)
        check_rows("kv.k", self.k)
        if self.v.stride() != self.k.stride():
            raise ValueError(f"kv.v has strides {self.v.stride()}, expected kv.k's {self.k.stride()}")
        self._check_scales()

    def _check_scales(self) -> None:
        if (self.k_scales is None) != (self.v_scales is None) or (self.k_scales is not None) != self.quantised:
            raise ValueError(f"kv of {self.k.dtype}: expected scales of both K and V where it is quantised, else none")
        if self.k_scales is None or self.v_scales is None:
            return
        for name, scales in (("kv.k_scales", self.k_scales), ("kv.v_scales", self.v_scales)):
            check_shape(name, scales, tuple(self.k.shape[:3]))
            check_dtype(name, scales, torch.float32)
            check_rows(name, scales)
        if self.v_scales.stride() != self.k_scales.stride():
            raise ValueError(f"kv.v_scales has strides {self.v_scales.stride()}, expected those of kv.k_scales")

    @property
    def quantised(self) -> bool:
        return self.k.dtype in QUANTISED_DTYPES

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_heads(self) -> int:
        """KV heads."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def scale_strides(self) -> tuple[int, int]:
        """From block to block and from head to head; 0 without scales."""
        return (0, 0) if self.k_scales is None else (self.k_scales.stride(0), self.k_scales.stride(1))

    def of_heads(self, heads: range) -> PagedKV:
        """The same memory, seen by who computes these KV heads alone."""
        run = slice(heads.start, heads.stop)
        if self.k_scales is None or self.v_scales is None:
            return PagedKV(self.k[:, run], self.v[:, run])
        return PagedKV(self.k[:, run], self.v[:, run], self.k_scales[:, run], self.v_scales[:, run])

    def check_query(self, q: torch.Tensor) -> None:
        """q [*, Hq, D], Hq a multiple of Hkv, of a dtype that this cache goes with.

        Raises ValueError or TypeError.
        """
        check_shape("q", q, (None, None, self.head_dim))
        if q.shape[1] % self.num_heads:
            raise ValueError(f"q has {q.shape[1]} heads, expected a multiple of the cache's {self.num_heads}")
        self.check_dtype("q", q)
        check_rows("q", q)

    def check_dtype(self, name: str, tensor: torch.Tensor) -> None:
        """Raises TypeError for a tensor that this cache does not go with."""
        allowed = _COMPUTED_IN.get(self.k.dtype)
        if allowed is None:
            check_dtype(name, tensor, self.k.dtype)
        elif tensor.dtype not in allowed:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(map(str, allowed))}")
