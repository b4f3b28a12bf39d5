"""Known mistakes, each a replacement of a few characters in one Triton kernel that its tests must notice.

`old` must occur exactly once in the file: whoever changes a line named here changes its entries too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "kernels" / "triton"


class SourceMovedOn(Exception):
    """A mutant no longer applies to its source."""


@dataclass(frozen=True)
class Mutant:
    """`kernel`: a file of kernels/triton/; `tests`: the file of tests/kernels/triton_interpreted/ that must fail."""

    kernel: str
    mistake: str
    old: str
    new: str
    tests: str

    @property
    def name(self) -> str:
        return f"{self.kernel}: {self.mistake}"

    def applied(self, source: str) -> str:
        """The kernel's source with the mistake. Raises SourceMovedOn unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise SourceMovedOn(f"{self.name}: {self.old!r} occurs {count} times, expected once")
        return source.replace(self.old, self.new)


def _of(kernel: str, *mistakes: tuple[str, str, str], tests: str | None = None) -> list[Mutant]:
    return [Mutant(kernel, mistake, old, new, tests or f"test_{kernel}") for mistake, old, new in mistakes]


MUTANTS = [
    *_of(
        "paged_decode",
        ("a key too many", "valid = position < end", "valid = position <= end"),
        (
            "split runs past the context",
            "end = tl.minimum(begin + SPLIT_TOKENS, context_len)",
            "end = begin + SPLIT_TOKENS",
        ),
        ("scale missing", "* scale_log2e", "* 1.0"),
        (
            "window off by one",
            "begin = tl.maximum(begin, context_len - WINDOW)",
            "begin = tl.maximum(begin, context_len - WINDOW - 1)",
        ),
        (
            "window does not skip splits",
            "first = tl.maximum(context_len - WINDOW, 0) // SPLIT_TOKENS",
            "first = context_len * 0",
        ),
        ("scales of K missing", "scores *= tl.load(k_scales_ptr", "tl.load(k_scales_ptr"),
        ("scales of V missing", "weights *= tl.load(v_scales_ptr", "tl.load(v_scales_ptr"),
        ("soft cap missing", "scores = capped(scores, SOFT_CAP_LOG2E)", "scores = scores * 1.0"),
        ("wrong block", "tl.load(table_ptr + position // BLOCK_SIZE", "tl.load(table_ptr + start // BLOCK_SIZE"),
        ("wrong slot", "(position % BLOCK_SIZE) * slot_stride", "((position + 1) % BLOCK_SIZE) * slot_stride"),
        ("wrong head group", "head = kv_head * GROUP + g", "head = kv_head + g * num_kv_heads"),
        ("sum not rescaled", "total = total * factor + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
        ("values not rescaled", "acc = acc * factor[:, None] + tl.dot(", "acc = acc + tl.dot("),
        (
            "no mask on values",
            "mask=kv_mask, other=0.0)\n        acc",
            "mask=(d < HEAD_DIM)[None, :], other=0.0)\n        acc",
        ),
        ("wrong sequence", "tl.sum((ends <= ordinal).to(tl.int32), 0)", "tl.sum((ends < ordinal).to(tl.int32), 0)"),
        (
            "padded heads stored",
            "acc / total[:, None], mask=q_mask)",
            "acc / total[:, None], mask=(d < HEAD_DIM)[None, :])",
        ),
        (
            "programs do one item only",
            "tl.max(ends, 0) * num_kv_heads, tl.num",
            "tl.minimum(tl.max(ends, 0) * num_kv_heads, tl.num_programs(0)), tl.num",
        ),
        (
            "merge of the first splits only",
            "range(0, num_splits, SPLITS)",
            "range(0, tl.minimum(num_splits, SPLITS), SPLITS)",
        ),
        ("merge without weights", "tl.sum(partial * weights[:, None], 0)", "tl.sum(partial, 0)"),
        ("merge not rescaled", "acc = acc * factor + tl.sum(", "acc = acc + tl.sum("),
        ("merge divides padding rows by zero", "tl.where(num_splits > 0, total, 1.0)", "total"),
    ),
    *_of(
        "paged_decode",
        ("32-bit offsets", "mask=valid, other=0).to(tl.int64)", "mask=valid, other=0)"),
        tests="test_large_cache",
    ),
    *_of(
        "paged_prefill",
        (
            "causal mask off by one",
            "position[None, :] <= num_before + i[:, None]",
            "position[None, :] < num_before + i[:, None]",
        ),
        (
            "context before the chunk ignored",
            "position[None, :] <= num_before + i[:, None]",
            "position[None, :] <= i[:, None]",
        ),
        ("no causal mask", "position[None, :] <= num_before + i[:, None]", "position[None, :] >= 0 * i[:, None]"),
        ("window off by one", "end - 1) - WINDOW", "end - 1) - WINDOW - 1"),
        ("reads blocks before the window", "tile * QUERIES - WINDOW + 1", "tile * QUERIES - WINDOW - 2 * BLOCK_SIZE"),
        ("scales of K missing", "scores *= tl.load(k_scales_ptr", "tl.load(k_scales_ptr"),
        ("scales of V missing", "weights *= tl.load(v_scales_ptr", "tl.load(v_scales_ptr"),
        ("soft cap missing", "scores = capped(scores, SOFT_CAP_LOG2E)", "scores = scores * 1.0"),
        ("scale missing", "* scale_log2e", "* 1.0"),
        ("wrong kv head", "(head // GROUP) * cache_head_stride", "(head % GROUP) * cache_head_stride"),
        (
            "keys of the last query missing",
            "tl.minimum((tile + 1) * QUERIES, num_new)",
            "tl.minimum((tile + 1) * QUERIES, num_new - 1)",
        ),
        ("every sequence writes the first rows", "token = (first + i)", "token = (first * 0 + i)"),
        ("sum not rescaled", "total = total * factor + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
        ("sum not divided by", "acc / total[:, None]", "acc"),
    ),
    *_of(
        "paged_prefill",
        ("32-bit offsets", "other=0).to(tl.int64)", "other=0)"),
        tests="test_large_cache",
    ),
    *_of(
        "soft_cap",
        ("polynomial far from zero", "size < 0.625", "size < 6.25"),
        ("sign lost", "tl.where(x < 0, -quotient, quotient)", "quotient"),
        tests="test_paged_decode",
    ),
    *_of(
        "kv_write",
        ("wrong slot", "(slot % BLOCK_SIZE) * slot_stride", "((slot + 1) % BLOCK_SIZE) * slot_stride"),
        ("wrong block", "(slot // BLOCK_SIZE) * block_stride", "((slot + 1) // BLOCK_SIZE) * block_stride"),
        ("K in place of V", "v = tl.load(v_ptr + token * v_stride", "v = tl.load(k_ptr + token * v_stride"),
        ("skipped slots written", "if slot >= 0:", "if slot >= -1:"),
    ),
    *_of(
        "kv_formats",
        ("sign of the largest ignored", "size = tl.abs(wide)", "size = wide"),
        ("rounded down", "(scaled + ROUNDS_TO_INTEGER) - ROUNDS_TO_INTEGER", "tl.floor(scaled)"),
        ("infinities taken for large", "tl.where(finite, 0, 1)", "tl.where(finite, 0, 0)"),
        ("tiny rows scaled", "peak >= SMALLEST_PEAK", "peak > 0"),
        ("scale inverted", "tl.div_rn(divisor, limit)", "tl.div_rn(limit, divisor)"),
        tests="test_kv_write",
    ),
    *_of(
        "rms_norm",
        ("residual not added", "(x + residual)", "(x)"),
        ("sum without the residual normalised", "x = rounded.to(tl.float32)", "pass"),
        ("epsilon missing", "/ COLUMNS + eps", "/ COLUMNS"),
        ("mean over the padding", "/ COLUMNS + eps", "/ COLUMNS_PADDED + eps"),
        ("weight missing", "x * factor * weight", "x * factor"),
        ("row stride ignored", "x_ptr + row * x_stride", "x_ptr + row * COLUMNS"),
    ),
    *_of(
        "rope",
        ("turned the other way", "first * cos - second * sin", "first * cos + second * sin"),
        ("row number for position", "cos_ptr + position * HALF", "cos_ptr + token * HALF"),
        ("heads past the last", "(h < HEADS) & (i < HALF)", "(h < HEADS_PADDED) & (i < HALF)"),
        ("K's stride is Q's", "rotate_heads(k_ptr + token * k_stride", "rotate_heads(k_ptr + token * q_stride * 0"),
    ),
    *_of(
        "gates",
        ("no tail mask", "mask = column < columns", "mask = column < columns + 1"),
        ("silu: gate and up swapped", "gate / (1.0 + tl.exp(-gate)) * up", "up / (1.0 + tl.exp(-up)) * gate"),
        ("up's columns", "row_stride + columns + column", "row_stride + column"),
        ("gelu: square for a cube", "0.044715 * gate * gate * gate", "0.044715 * gate * gate"),
        ("gelu: sign lost", "tl.where(twice > 0, 1.0, small)", "1.0"),
    ),
    *_of(
        "sampling",
        ("top-k keeps one too few", ">= top_k", "> top_k"),
        ("top-p of the unnormalised sum", "wanted = top_p * total", "wanted = top_p"),
        ("ties of top-k have no mass", " + k_ties * key_weight(k_cut, peak)", ""),
        ("one tie too few", "tl.cumsum(tied, 0) <= ties", "tl.cumsum(tied, 0) < ties"),
        ("ties of earlier blocks forgotten", "ties_before += tl.sum(tied, 0)", "ties_before += 0"),
        ("min-p missing", "& (logits.to(tl.float64) >= lowest)", ""),
        ("zeros of unlike sign differ", 'other=float("-inf")) + 0.0', 'other=float("-inf"))'),
        ("draw takes a token at the target", "tl.cumsum(probs, 0) > target", "tl.cumsum(probs, 0) >= target"),
        ("draw past the end", "tl.minimum(chosen, last)", "chosen"),
        ("earlier blocks not counted", "before += tl.sum(probs, 0)", "before += 0"),
    ),
    *_of(
        "block_copy",
        ("wrong row", "row = piece // pieces", "row = piece % num_rows"),
        ("no tail mask", "mask = word < row_vectors * WORDS", "mask = word < row_vectors * WORDS + WORDS"),
        ("first round only", "num_rows * pieces, tl.num", "tl.minimum(num_rows * pieces, tl.num_programs(0)), tl.num"),
        ("source's stride for the target", "* target_stride * WORDS", "* source_stride * WORDS"),
    ),
    *_of(
        "linear",
        ("scale of the group missing", "products *= scales[None, :]", "products *= 1.0"),
        (
            "scale of the row missing",
            "acc *= tl.load(row_scale_ptr + n, mask=n < columns, other=0.0)[None, :]",
            "acc *= 1.0",
        ),
        ("first group's scale for all", "num_groups + group) * PANEL", "num_groups) * PANEL"),
        ("offsets missing", "products += tl.sum(x.to(tl.float32), 1)[:, None] * offsets[None, :]", "products += 0.0"),
        ("bias missing", "acc += tl.load(bias_ptr + n", "acc += 0.0 * tl.load(bias_ptr + n"),
        ("nibbles in plain order", "i % 4 * 8 + i // 4 * 4", "i * 4"),
        ("middle not subtracted", "& 15) - SUBTRACT", "& 15)"),
        ("bytes without a sign", "(pieces[:, None, :] << (24 - 8 * i)) >> 24", "(pieces[:, None, :] >> (8 * i)) & 255"),
        ("wrong panel", "panel = (n // PANEL)", "panel = (n // (2 * PANEL))"),
        ("columns past the last read", "(k < depth)[None, :]", "(k < depth + 1)[None, :]"),
    ),
]
