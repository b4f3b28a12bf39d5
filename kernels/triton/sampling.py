"""Triton implementations for kernels/sampling.py: no sort, no transfer to the host.

Float logits order like the integers of their bits (with the negative ones flipped), so the k-th largest, or the one at
which the probability reaches top_p, is found by bisection over integers: 32 passes over a row that stays in the second-
level cache. Of the tokens that tie at the cut, the lowest ids survive, as in the sort of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_BISECTIONS = tl.constexpr(32)
_MAX_BLOCK = 4096


@triton.jit
def load_keys(row_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """(mask, logits, keys) of BLOCK tokens; keys are int64 in the order of the logits, lowest where masked."""
    token = start + tl.arange(0, BLOCK)
    mask = token < vocab_size
    logits = tl.load(row_ptr + token, mask=mask, other=float("-inf")) + 0.0  # -0.0 becomes 0.0: they tie
    bits = logits.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return mask, logits, tl.where(mask, keys, _LOWEST - 1)


@triton.jit
def largest(row_ptr, vocab_size, BLOCK: tl.constexpr):
    peak = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        _, logits, _ = load_keys(row_ptr, start, vocab_size, BLOCK)
        peak = tl.maximum(peak, tl.max(logits, 0))
    return peak


@triton.jit
def count_above(row_ptr, vocab_size, bound, BLOCK: tl.constexpr):
    """How many keys are larger than `bound`."""
    count = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        _, _, keys = load_keys(row_ptr, start, vocab_size, BLOCK)
        count += tl.sum((keys > bound).to(tl.int64), 0)
    return count


@triton.jit
def mass_above(row_ptr, vocab_size, bound, peak, BLOCK: tl.constexpr):
    """Sum of exp(logit - peak), float64, over the keys larger than `bound`."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        _, logits, keys = load_keys(row_ptr, start, vocab_size, BLOCK)
        weights = tl.exp(logits.to(tl.float64) - peak.to(tl.float64))
        mass += tl.sum(tl.where(keys > bound, weights, 0.0), 0)
    return mass


@triton.jit
def cut_top_k(row_ptr, vocab_size, top_k, BLOCK: tl.constexpr):
    """(cut, ties): the k-th largest key and how many tokens that equal it are among the first k."""
    low = tl.full([], _LOWEST, tl.int64)
    high = tl.full([], _HIGHEST, tl.int64)
    for _ in range(_BISECTIONS):
        middle = (low + high + 1) >> 1
        enough = count_above(row_ptr, vocab_size, middle - 1, BLOCK) >= top_k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low, top_k - count_above(row_ptr, vocab_size, low, BLOCK)


@triton.jit
def key_weight(key, peak):
    """exp(logit - peak) of the logit that a key stands for, float64."""
    bits = key.to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp(logit.to(tl.float64) - peak.to(tl.float64))


@triton.jit
def cut_top_p(row_ptr, vocab_size, top_p, peak, k_cut, k_ties, BLOCK: tl.constexpr):
    """(cut, ties) of the tokens, among those that top_k left, before which less than top_p of the probability lies."""
    total = mass_above(row_ptr, vocab_size, k_cut, peak, BLOCK) + k_ties * key_weight(k_cut, peak)
    wanted = top_p * total
    low = k_cut
    high = tl.full([], _HIGHEST, tl.int64)
    for _ in range(_BISECTIONS):
        middle = (low + high + 1) >> 1
        enough = (mass_above(row_ptr, vocab_size, middle - 1, peak, BLOCK) >= wanted) | (middle <= k_cut)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    missing = wanted - mass_above(row_ptr, vocab_size, low, peak, BLOCK)
    ties = tl.maximum(tl.ceil(missing / key_weight(low, peak)), 1.0).to(tl.int64)
    return low, tl.where(low == k_cut, tl.minimum(ties, k_ties), ties)


@triton.jit
def filter_kernel(
    logits_ptr,  # float32 [B, V]
    row_ptr,  # int64 [R]: the rows to filter
    top_k_ptr,  # int64 [R]; V when off
    top_p_ptr,  # float64 [R]; 1 when off
    log_min_p_ptr,  # float64 [R]; -inf when off
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    index = tl.program_id(0)
    row = logits_ptr + tl.load(row_ptr + index) * row_stride
    top_p = tl.load(top_p_ptr + index)
    peak = largest(row, vocab_size, BLOCK)
    cut, ties = cut_top_k(row, vocab_size, tl.load(top_k_ptr + index), BLOCK)
    if top_p < 1.0:
        cut, ties = cut_top_p(row, vocab_size, top_p, peak, cut, ties, BLOCK)
    lowest = peak.to(tl.float64) + tl.load(log_min_p_ptr + index)
    ties_before = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        mask, logits, keys = load_keys(row, start, vocab_size, BLOCK)
        tied = (keys == cut).to(tl.int64)
        among_ties = (keys == cut) & (ties_before + tl.cumsum(tied, 0) <= ties)
        keep = ((keys > cut) | among_ties) & (logits.to(tl.float64) >= lowest)
        tl.store(row + start + tl.arange(0, BLOCK), float("-inf"), mask=mask & (keep == 0))
        ties_before += tl.sum(tied, 0)


def filter_logits(
    logits: torch.Tensor, rows: Sequence[int], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
) -> None:
    """Filters the given rows of logits float32 [B, V] in place; the parameters have B entries."""
    vocab_size = logits.shape[1]
    doubles = torch.tensor([[top_p[row], min_p[row]] for row in rows], dtype=torch.float64)
    integers = torch.tensor([[row, min(top_k[row] or vocab_size, vocab_size)] for row in rows], dtype=torch.int64)
    row_ids, ks = integers.T.contiguous().to(logits.device)
    ps, log_min_ps = torch.stack((doubles[:, 0], doubles[:, 1].log())).to(logits.device)
    filter_kernel[(len(rows),)](
        *(logits, row_ids, ks, ps, log_min_ps, logits.stride(0), vocab_size),
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


@triton.jit
def draw_kernel(
    probs_ptr,  # float32 [B, V]
    uniform_ptr,  # float64 [B]
    out_ptr,  # int64 [B]
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program: one row. Rounding may leave no token beyond the target: then the last possible one is drawn."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        probs = tl.load(probs_ptr + row * row_stride + token, mask=token < vocab_size, other=0.0)
        total += tl.sum(probs.to(tl.float64), 0)
    target = tl.load(uniform_ptr + row) * total
    before = tl.full([], 0.0, tl.float64)
    chosen = tl.full([], 0, tl.int64) + vocab_size
    last = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        probs = tl.load(probs_ptr + row * row_stride + token, mask=token < vocab_size, other=0.0).to(tl.float64)
        beyond = (before + tl.cumsum(probs, 0) > target) & (probs > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(beyond, token, vocab_size), 0))
        last = tl.maximum(last, tl.max(tl.where(probs > 0, token, 0), 0))
        before += tl.sum(probs, 0)
    tl.store(out_ptr + row, tl.minimum(chosen, last))


def draw(probs: torch.Tensor, uniforms: torch.Tensor, out: torch.Tensor) -> None:
    """Fills out int64 [B] from probs float32 [B, V] and uniforms float64 [B]."""
    batch, vocab_size = probs.shape
    if batch == 0:
        return
    draw_kernel[(batch,)](
        *(probs, uniforms, out, probs.stride(0), vocab_size),
        BLOCK=min(_MAX_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
