"""The shape of a pod's KV cache, and the fingerprint by which two pods know that they can exchange blocks.

A block-major cache is one array of blocks, and a block its layers one after the other, of equally many bytes: K and V,
[k/v, kv_head, token in block, dim], and their scales, when they are quantised. So a block, or any range of its layers,
moves with one descriptor, whatever is in it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from proto import kv_pb2

LAYOUT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Raises ValueError when half-specified. Sizes are in bytes."""

    model_id: str
    weights_revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # of activations: unlike ones give unlike KV
    kv_dtype: str  # of what a block holds
    block_bytes: int
    tp_size: int = 1
    tp_rank: int = 0
    memory_order: str = "block_major"
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "block_bytes", "tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVLayout.{name} = {getattr(self, name)}: must be at least 1")
        for name in ("dtype", "kv_dtype"):
            if not getattr(self, name):
                raise ValueError(f"KVLayout.{name} = '': must be named")
        if self.block_bytes % self.num_layers:
            raise ValueError(
                f"KVLayout.block_bytes = {self.block_bytes}: must be a multiple of num_layers {self.num_layers}"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"KVLayout.tp_rank = {self.tp_rank}: must be below tp_size {self.tp_size}")
        if self.memory_order != "block_major":
            raise ValueError(f"KVLayout.memory_order = {self.memory_order!r}: must be 'block_major'")

    @property
    def fingerprint(self) -> str:
        """32 hex digits over every field."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    def mismatch(self, other: KVLayout) -> str | None:
        """The first field that keeps the two from exchanging blocks, as `block_size 16 != 32`; None when none does."""
        for f in fields(self):
            ours, theirs = getattr(self, f.name), getattr(other, f.name)
            if ours != theirs:
                return f"{f.name} {ours} != {theirs}"
        return None

    def to_proto(self) -> kv_pb2.KVLayout:
        return kv_pb2.KVLayout(**asdict(self), fingerprint=self.fingerprint)

    @classmethod
    def from_proto(cls, message: kv_pb2.KVLayout) -> KVLayout:
        """Raises ValueError on a half-specified layout."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})
