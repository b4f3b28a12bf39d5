"""How the processes of one pod share a model: which heads, inner columns and words each of them computes. Pure.

The linears that make heads and gates are split by their output rows, the ones after them by their input columns, so
that each block of a layer ends in one sum over all ranks (Shoeybi et al., 2019, "Megatron-LM"). A split need not be
even: a slice of a weight is a view of the file whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model_config import ModelConfig

# Where a model is large enough, inner columns are cut on cache lines and between the groups of quantised weights.
COLUMN_UNIT = 128
WORD_UNIT = 16  # and words between the panels of quantised weights


@dataclass(frozen=True, slots=True)
class Heads:
    """A rank's query heads, which form whole groups of equal size over its KV heads."""

    query: range
    kv: range


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Raises ValueError when there is no such rank."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size = {self.size}: must be at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank = {self.rank}: must be at least 0 and below size {self.size}")

    def part(self, count: int) -> range:
        """This rank's share of `count` things in a row; shares differ by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def columns(self, count: int) -> range:
        """This rank's share of a feed-forward block's inner columns."""
        return self._cut(count, COLUMN_UNIT)

    def words(self, count: int) -> range:
        """This rank's share of the vocabulary."""
        return self._cut(count, WORD_UNIT)

    def _cut(self, count: int, unit: int) -> range:
        """A part that begins at a multiple of `unit`, where there are enough of them."""
        unit = unit if count >= unit * self.size else 1
        units = self.part(-(-count // unit))
        return range(units.start * unit, min(count, units.stop * unit))

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        """KV heads go whole, each with its query heads. Where there are more ranks than KV heads, several ranks keep
        the same KV head and share its query heads."""
        group = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            kv = self.part(num_kv_heads)
            return Heads(range(kv.start * group, kv.stop * group), kv)
        head = next(h for h in range(num_kv_heads) if self.rank in Shard(h, num_kv_heads).part(self.size))
        keepers = Shard(head, num_kv_heads).part(self.size)
        query = Shard(self.rank - keepers.start, len(keepers)).part(group)
        return Heads(range(head * group + query.start, head * group + query.stop), range(head, head + 1))

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank sees it between its norms: with its own heads only."""
        heads = self.heads(config.num_heads, config.num_kv_heads)
        return replace(config, num_heads=len(heads.query), num_kv_heads=len(heads.kv))


WHOLE = Shard()


def check_tensor_parallel(config: ModelConfig, size: int) -> None:
    """Raises ValueError, with the allowed sizes, unless every one of `size` ranks gets something of every part."""
    counts = {"num_attention_heads": config.num_heads, "vocab_size": config.vocab_size}
    for layer in config.layers:
        if layer.experts is None:
            counts["intermediate_size"] = config.intermediate_size
        else:
            counts["inner size of an expert"] = layer.experts.size
    name, most = min(counts.items(), key=lambda item: item[1])
    if not 1 <= size <= most:
        raise ValueError(f"tensor_parallel = {size}: this model takes 1 to {most}, its {name}")
