"""One layer's paged KV cache, as every op that reads or writes it takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.checks import check_dtype, check_rows, check_shape


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """K and V in blocks: [N, Hkv, block_size, D] each, of one dtype and of equal strides, any but the last.

    Checked once, here, and used for every step. Raises ValueError or TypeError for shapes, strides and dtypes.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        check_shape("kv.k", self.k, (None, None, None, None))
        check_shape("kv.v", self.v, tuple(self.k.shape))
        check_dtype("kv.v", self.v, self.k.dtype)
        check_rows("kv.k", self.k)
        if self.v.stride() != self.k.stride():
            raise ValueError(f"kv.v has strides {self.v.stride()}, expected kv.k's {self.k.stride()}")

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

    def of_heads(self, heads: range) -> PagedKV:
        """The same memory, seen by who computes these KV heads alone."""
        run = slice(heads.start, heads.stop)
        return PagedKV(self.k[:, run], self.v[:, run])

    def check_query(self, q: torch.Tensor) -> None:
        """q [*, Hq, D] of the dtype that this cache serves, Hq a multiple of Hkv. Raises ValueError or TypeError."""
        check_shape("q", q, (None, None, self.head_dim))
        if q.shape[1] % self.num_heads:
            raise ValueError(f"q has {q.shape[1]} heads, expected a multiple of the cache's {self.num_heads}")
        check_dtype("q", q, self.k.dtype)
        check_rows("q", q)
