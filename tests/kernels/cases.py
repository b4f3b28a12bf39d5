"""Inputs for the attention tests, with their answers in float64 from the dense tokens: no block table is read there.

The cache is block-major, [N, L, 2, Hkv, block_size, D], as the engine keeps it, and NaN wherever no token lies; block
tables end in -1. A kernel that reads a slot or an entry too many gives NaN or fails. Quantised caches hold drawn bytes
under drawn scales, which are NaN where no token lies.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kernels.kv_cache import QUANTISED_DTYPES, PagedKV

Array = npt.NDArray[np.float64]
Index = slice | list[int] | list[bool] | npt.NDArray[np.bool_]

# What one rounding to the dtype may add to float32 arithmetic: (rtol, atol).
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (2**-8, 1e-5), torch.float16: (2**-10, 1e-5)}

# Attention may round its weights, and dequantised values, to the queries' dtype before the second product, as units for
# bfloat16 want them: two roundings, as a share of the values' size.
WEIGHT_ROUNDING = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}

# What float32 arithmetic adds to attention, as a share of the values' size and for each unit of the products that are
# summed up to a score: 16 units in the last place. The most that 1,200 draws of four implementations showed was 2.
FLOAT32_ROUNDING = 2**-20

# Contexts around the ends of blocks, tiles and splits.
_EDGES = (1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 257, 511, 512, 513, 1024, 1025, 2047, 4096)


class Limits(TypedDict, total=False):
    """The optional arguments of both ops."""

    sliding_window: int | None
    soft_cap: float | None


@dataclasses.dataclass(frozen=True)
class Attention:
    """The arguments of paged_prefill (and, with one query a sequence, of paged_decode) and the expected output."""

    q: torch.Tensor
    kv: PagedKV
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    limits: Limits
    expected: Array
    value_sizes: Array  # as expected, over absolute values: what the errors of weights are multiplied by
    rounding: Array  # what float32 arithmetic may add


@dataclasses.dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    lengths: tuple[tuple[int, int], ...]  # of each sequence: (new tokens, context)
    seed: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    kv_dtype: torch.dtype | None = None  # of the cache, where it is not `dtype`

    @property
    def quantised_dtype(self) -> torch.dtype | None:
        return self.kv_dtype if self.kv_dtype in QUANTISED_DTYPES else None


def shapes(
    *,
    max_new: int | None = None,
    max_context: int = 600,
    max_kv_heads: int = 3,
    groups: tuple[int, ...] = (1, 2, 3, 4, 7, 8),
    dtypes: tuple[torch.dtype, ...],
) -> st.SearchStrategy[Shape]:
    """`max_new` 1 draws decode batches. Contexts favour the neighbourhood of block and tile ends."""
    contexts = st.one_of(
        st.sampled_from([n for n in _EDGES if n <= max_context]),
        st.integers(1, max_context),
    )
    lengths = contexts.flatmap(lambda c: st.tuples(st.integers(1, min(c, max_new or c)), st.just(c)))
    return st.builds(
        Shape,
        num_kv_heads=st.integers(1, max_kv_heads),
        group=st.sampled_from(groups),
        head_dim=st.sampled_from([16, 64, 72, 128]),
        block_size=st.sampled_from([4, 8, 16, 32, 64]),
        dtype=st.sampled_from(dtypes),
        lengths=st.lists(lengths, min_size=1, max_size=3).map(tuple),
        seed=st.integers(0, 2**16),
        sliding_window=st.one_of(st.none(), st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65]), st.integers(1, 700)),
        soft_cap=st.sampled_from([None, 1.0, 5.0, 50.0]),
        kv_dtype=st.sampled_from([None, torch.bfloat16, *QUANTISED_DTYPES]),
    ).filter(lambda s: s.kv_dtype != torch.bfloat16 or s.dtype in (torch.float32, torch.bfloat16))


def attention(shape: Shape, *, scale: float | None = None) -> Attention:
    """Draws tokens, writes them into shuffled blocks, computes the answer. Blocks before every window stay NaN."""
    generator = torch.Generator().manual_seed(shape.seed)
    used = [-(-context // shape.block_size) for _, context in shape.lengths]
    num_blocks = sum(used) + 2
    cache = BlockMajor(num_blocks, shape)
    free = iter(torch.randperm(num_blocks, generator=generator).tolist())
    block_tables = torch.full((len(used), max(used) + 1), -1, dtype=torch.int32)
    scale = shape.head_dim**-0.5 if scale is None else scale
    limits: Limits = {"sliding_window": shape.sliding_window, "soft_cap": shape.soft_cap}
    queries, answers = [], []
    for row, (num_new, context) in enumerate(shape.lengths):
        table = list(itertools.islice(free, used[row]))
        block_tables[row, : used[row]] = torch.tensor(table)
        drawn = Tokens(shape, context, generator)
        for position in range(first_read(shape, num_new, context), context):
            cache.put(table[position // shape.block_size], position % shape.block_size, drawn, position)
        # Queries are a slice of something wider, as the model's are.
        wide = torch.randn(num_new, shape.num_kv_heads * shape.group + 2, shape.head_dim, generator=generator)
        queries.append(wide.to(shape.dtype))
        answers.append(dense_attention(queries[-1][:, :-2], *drawn.values, scale, **limits))
    expected, value_sizes, score_sizes = (np.concatenate(parts) for parts in zip(*answers, strict=True))
    new_tokens = [0, *itertools.accumulate(num_new for num_new, _ in shape.lengths)]
    return Attention(
        q=torch.cat(queries)[:, :-2],
        kv=cache.layer,
        block_tables=block_tables,
        cu_seqlens=torch.tensor(new_tokens, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in shape.lengths], dtype=torch.int32),
        scale=scale,
        limits=limits,
        expected=expected,
        value_sizes=value_sizes,
        rounding=FLOAT32_ROUNDING * value_sizes * (1 + score_sizes),
    )


class Tokens:
    """K and V of a sequence: `stored` [2, Hkv, c, D] and, where the cache is quantised, `scales` [2, Hkv, c]."""

    def __init__(self, shape: Shape, context: int, generator: torch.Generator) -> None:
        drawn = torch.randn(2, shape.num_kv_heads, context, shape.head_dim, generator=generator)
        self.scales: torch.Tensor | None = None
        quantised = shape.quantised_dtype
        if quantised is None:
            self.stored = drawn.to(shape.kv_dtype or shape.dtype)
            self.values = (self.stored[0], self.stored[1])
            return
        self.scales = torch.rand(drawn.shape[:3], generator=generator) * 0.05 + 0.001
        limit = QUANTISED_DTYPES[quantised]
        self.stored = (drawn * 40).clamp(-limit, limit).to(quantised)
        values = self.stored.double() * self.scales.double()[..., None]
        self.values = (values[0], values[1])


class BlockMajor:
    """A cache [N, 2 layers, 2, Hkv, block_size, D] without tokens."""

    def __init__(self, num_blocks: int, shape: Shape) -> None:
        slots = (num_blocks, 2, 2, shape.num_kv_heads, shape.block_size)
        self._scales = torch.full(slots, torch.nan) if shape.quantised_dtype is not None else None
        poison = 85.0 if shape.kv_dtype == torch.int8 else torch.nan
        self._cache = torch.full((*slots, shape.head_dim), poison).to(shape.kv_dtype or shape.dtype)

    @property
    def layer(self) -> PagedKV:
        parts = (self._cache,) if self._scales is None else (self._cache, self._scales)
        return PagedKV(*(part[:, 1, i] for part in parts for i in range(2)))

    def put(self, block: int, slot: int, tokens: Tokens, position: int) -> None:
        self._cache[block, 1, :, :, slot] = tokens.stored[:, :, position]
        if self._scales is not None and tokens.scales is not None:
            self._scales[block, 1, :, :, slot] = tokens.scales[:, :, position]


def slot_major(kv: PagedKV) -> PagedKV:
    """The same cache in other strides: the heads of a slot side by side."""
    k, v = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (kv.k, kv.v))
    return dataclasses.replace(kv, k=k, v=v)


def first_read(shape: Shape, num_new: int, context: int) -> int:
    """The first position of the first block that holds a key which one of the new tokens sees."""
    window = context if shape.sliding_window is None else shape.sliding_window
    return max(0, context - num_new - window + 1) // shape.block_size * shape.block_size


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Array, Array, Array]:
    """Causal attention in float64. q: [n, Hq, D], the last n positions; k, v: [Hkv, c, D].

    Returns its output and the same over absolute values, both [n, Hq, D], and [n, Hq, 1] the largest sum of absolute
    products that a score of a visible key is made of."""
    queries, keys, values = float64(q), float64(k), float64(v)
    num_new, num_heads, _ = queries.shape
    group = num_heads // keys.shape[0]
    distance = np.arange(keys.shape[1] - num_new, keys.shape[1])[:, None] - np.arange(keys.shape[1])  # back to the key
    hidden = (distance < 0) | (distance >= (np.inf if sliding_window is None else sliding_window))
    out, value_sizes, score_sizes = (np.empty((num_new, num_heads, width)) for width in (q.shape[2], q.shape[2], 1))
    for h in range(num_heads):
        products = np.abs(queries[:, h]) @ np.abs(keys[h // group]).T * scale
        score_sizes[:, h] = np.where(hidden, 0, products).max(1, keepdims=True)
        scores = queries[:, h] @ keys[h // group].T * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[:, h] = weights @ values[h // group]
        value_sizes[:, h] = weights @ np.abs(values[h // group])
    return out, value_sizes, score_sizes


def float64(tensor: torch.Tensor) -> Array:
    array: Array = tensor.double().numpy()
    return array


def weight_rounding(implementation: str, dtype: torch.dtype) -> float:
    """What an implementation that multiplies bfloat16 by bfloat16 may add to the error, as a share of values' size."""
    return WEIGHT_ROUNDING[dtype] if implementation in ("cpu avx512bf16", "cpu amx") else 0.0


def assert_attends(actual: torch.Tensor, case: Attention, *, weights: float = 0.0, rows: Index = slice(None)) -> None:
    """`actual` is what the case expects of `rows`, but for float32 arithmetic and rounded `weights`: both err with the
    size of what is summed, which the sum itself, where its terms cancel out, says nothing of."""
    assert_close(actual, case.expected[rows], extra=(case.rounding + weights * case.value_sizes)[rows])


def assert_close(actual: torch.Tensor, expected: Array, *, extra: float | Array = 0.0) -> None:
    """Within the dtype's tolerance plus `extra` absolute error, of all or of each element. NaN is never close."""
    rtol, atol = TOLERANCE[actual.dtype]
    got = float64(actual)
    assert got.shape == expected.shape
    errors, allowed = np.abs(got - expected), atol + rtol * np.abs(expected) + extra
    wrong = ~(errors <= allowed)  # which holds for NaN
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} elements, the first at {np.argwhere(wrong)[0].tolist()}: "
        f"{got[wrong][0]} for {expected[wrong][0]}, off by {errors[wrong][0]:.3g} where {allowed[wrong][0]:.3g} may be"
    )
