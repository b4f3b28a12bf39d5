"""Sizes of models that kernels are compiled, predicted and measured for: from their published configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder-only transformer. hidden, inner: widths of the residual stream and of the feed-forward block."""

    name: str
    layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False  # the head is the embedding
    window: int | None = None  # latest tokens that attention sees
    soft_cap: float | None = None  # of attention scores

    @property
    def qkv_rows(self) -> int:
        return (self.query_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def linears(self) -> tuple[tuple[str, int, int], ...]:
        """(name, rows, columns) of one layer's matrices."""
        return (
            ("qkv", self.qkv_rows, self.hidden),
            ("output", self.hidden, self.query_heads * self.head_dim),
            ("gate_up", 2 * self.inner, self.hidden),
            ("down", self.hidden, self.inner),
        )

    @property
    def linear_weights(self) -> int:
        """Of all layers and the head; the embedding is looked up, not multiplied."""
        return self.layers * sum(rows * columns for _, rows, columns in self.linears) + self.vocab * self.hidden


SMOLLM2_135M = ModelShape(
    name="smollm2-135m",
    layers=30,
    hidden=576,
    inner=1536,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    tied=True,
)
LLAMA_3_8B = ModelShape(
    name="llama-3-8b",
    layers=32,
    hidden=4096,
    inner=14_336,
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
)
LLAMA_3_70B = ModelShape(
    name="llama-3-70b",
    layers=80,
    hidden=8192,
    inner=28_672,
    query_heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128_256,
)
GEMMA_2_9B = ModelShape(
    name="gemma-2-9b",
    layers=42,
    hidden=3584,
    inner=14_336,
    query_heads=16,
    kv_heads=8,
    head_dim=256,
    vocab=256_000,
    tied=True,
    window=4096,
    soft_cap=50.0,
)
