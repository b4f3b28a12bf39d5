"""The least time that a GPU can take: from the bytes and the operations of each kernel and of whole steps.

    python -m bench.kernels.roofline [--write]

Prints the tables of docs/gpu.md; `--write` writes them there. All of it is arithmetic: predicted, not measured.

A kernel's floor is the longer of two times: its bytes at the memory's bandwidth, its operations at the matrix units'
rate. Bytes are those that must cross the memory's pins once, whatever the kernel does. The expected time is the floor
by an efficiency that good kernels of that kind reach, plus the gap between two kernels of a replayed graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.kernels.model_shapes import LLAMA_3_8B, LLAMA_3_70B, SMOLLM2_135M, ModelShape

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- roofline: begin -->", "<!-- roofline: end -->"

ACTIVATION_BYTES = 2  # bfloat16
GAP_S = 1.5e-6  # between two kernels of a replayed graph

Kind = Literal["linear", "decode attention", "prefill attention", "rowwise", "sampling", "copy"]
# Of the floor, what good kernels of the kind reach: (bound by memory, bound by compute). Judgement, to be replaced by
# measurements.
EFFICIENCY: dict[Kind, tuple[float, float]] = {
    "linear": (0.80, 0.70),
    "decode attention": (0.75, 0.40),
    "prefill attention": (0.75, 0.50),
    "rowwise": (0.80, 0.80),
    "sampling": (0.20, 0.20),  # passes over rows that the second-level cache holds, which no floor counts
    "copy": (0.60, 0.60),  # 16 programs of 132 multiprocessors, on purpose
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Peaks of a GPU. flops: dense, 16-bit, of the matrix units."""

    name: str
    bytes_per_s: float
    flops: float
    memory_bytes: float


# NVIDIA's data sheet of the H200 SXM: 141 GB of HBM3e at 4.8 TB/s; 1,979 TFLOP/s bfloat16 with sparsity, half dense.
H200 = Chip(name="H200 SXM", bytes_per_s=4.8e12, flops=989.5e12, memory_bytes=141e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Bytes of a weight and of an element of the cache, with the scales beside them."""

    name: str
    weight_bytes: float
    kv_bytes: float
    kv_scale_bytes: float = 0.0  # beside each head's K and each head's V of a token


INT4_GROUP = 128  # weights that share a float16 scale
_INT4_BYTES = 0.5 + 2 / INT4_GROUP

BFLOAT16 = Format(name="bf16", weight_bytes=2, kv_bytes=2)
KV8 = Format(name="bf16, kv int8/fp8", weight_bytes=2, kv_bytes=1, kv_scale_bytes=4)
INT4 = Format(name="int4 weights", weight_bytes=_INT4_BYTES, kv_bytes=2)
INT4_KV8 = Format(name="int4, kv int8/fp8", weight_bytes=_INT4_BYTES, kv_bytes=1, kv_scale_bytes=4)
FORMATS = (BFLOAT16, KV8, INT4, INT4_KV8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one kernel, or several of the same sort one after the other, have to move and to compute."""

    name: str
    kind: Kind
    num_bytes: float
    flops: float
    launches: int = 1

    def floor_s(self, chip: Chip) -> float:
        return max(self.num_bytes / chip.bytes_per_s, self.flops / chip.flops)

    def bound(self, chip: Chip) -> Literal["memory", "compute"]:
        return "memory" if self.num_bytes / chip.bytes_per_s >= self.flops / chip.flops else "compute"

    def efficiency(self, chip: Chip) -> float:
        memory, compute = EFFICIENCY[self.kind]
        return memory if self.bound(chip) == "memory" else compute

    def expected_s(self, chip: Chip) -> float:
        return self.floor_s(chip) / self.efficiency(chip) + self.launches * GAP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one engine step computes: `new` tokens each of `sequences` sequences, whose contexts then have `context`."""

    sequences: int
    new: int
    context: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def name(self) -> str:
        if self.new == 1:
            return f"decode {self.sequences} x {self.context}"
        return f"prefill {self.new}" + (f" of {self.context}" if self.context > self.new else "")


def floor_s(chip: Chip, works: Iterable[Work]) -> float:
    return sum(work.floor_s(chip) for work in works)


def expected_s(chip: Chip, works: Iterable[Work]) -> float:
    return sum(work.expected_s(chip) for work in works)


def bound(chip: Chip, works: Sequence[Work]) -> Literal["memory", "compute"]:
    """What most of the floor's time waits for."""
    compute = floor_s(chip, (work for work in works if work.bound(chip) == "compute"))
    return "compute" if compute > floor_s(chip, works) / 2 else "memory"


def linear(name: str, tokens: int, rows: int, columns: int, weight_bytes: float) -> Work:
    """[tokens, columns] by a matrix [rows, columns]."""
    activations = tokens * (rows + columns) * ACTIVATION_BYTES
    return Work(
        name=name,
        kind="linear",
        num_bytes=rows * columns * weight_bytes + activations,
        flops=2.0 * tokens * rows * columns,
    )


def decode_attention(shape: ModelShape, step: Step, form: Format) -> Work:
    """One token a sequence over its context: split and merge."""
    queries = step.tokens * shape.query_heads * shape.head_dim
    seen = min(step.context, shape.window or step.context)
    return Work(
        name="paged_decode",
        kind="decode attention",
        num_bytes=step.sequences * seen * kv_token_bytes(shape, form) + 2 * queries * ACTIVATION_BYTES,
        flops=4.0 * queries * seen,
        launches=2,
    )


def prefill_attention(shape: ModelShape, step: Step, form: Format) -> Work:
    """Runs of new tokens, causally, over what lies before them and themselves. K and V cross the pins once."""
    before = step.context - step.new
    pairs = step.sequences * (step.new * before + step.new * (step.new + 1) / 2)
    queries = step.tokens * shape.query_heads * shape.head_dim
    return Work(
        name="paged_prefill",
        kind="prefill attention",
        num_bytes=step.sequences * step.context * kv_token_bytes(shape, form) + 2 * queries * ACTIVATION_BYTES,
        flops=4.0 * pairs * shape.query_heads * shape.head_dim,
    )


def attention(shape: ModelShape, step: Step, form: Format) -> Work:
    return (decode_attention if step.new == 1 else prefill_attention)(shape, step, form)


def rowwise(name: str, tokens: int, read: int, written: int, extra_bytes: float = 0.0) -> Work:
    """An op that passes over rows once: elements read and written of each token, and bytes that all of them share."""
    num_bytes = tokens * (read + written) * ACTIVATION_BYTES + extra_bytes
    return Work(name=name, kind="rowwise", num_bytes=num_bytes, flops=0.0)


def rms_norm(shape: ModelShape, tokens: int) -> Work:
    """With the residual addition before it."""
    return rowwise("fused_add_rms_norm", tokens, 2 * shape.hidden, 2 * shape.hidden, shape.hidden * ACTIVATION_BYTES)


def rope(shape: ModelShape, tokens: int) -> Work:
    heads = (shape.query_heads + shape.kv_heads) * shape.head_dim
    return rowwise("rope", tokens, heads, heads, tokens * shape.head_dim * 4.0)


def kv_write(shape: ModelShape, tokens: int, form: Format) -> Work:
    elements = 2 * shape.kv_heads * shape.head_dim
    return rowwise("kv_write", tokens, elements, 0, tokens * kv_token_bytes(shape, form))


def silu_mul(shape: ModelShape, tokens: int) -> Work:
    return rowwise("silu_mul", tokens, 2 * shape.inner, shape.inner)


def sampling(shape: ModelShape, rows: int) -> Work:
    """Filter, softmax and draw: logits are read three times and written twice, in float32."""
    return Work(name="sampling", kind="sampling", num_bytes=5.0 * rows * shape.vocab * 4, flops=0.0, launches=4)


def kv_token_bytes(shape: ModelShape, form: Format) -> float:
    """K and V of one token in one layer."""
    return 2 * shape.kv_heads * (shape.head_dim * form.kv_bytes + form.kv_scale_bytes)


def layer_kernels(shape: ModelShape, step: Step, form: Format) -> Iterator[Work]:
    """One layer's, in the order in which they run."""
    tokens = step.tokens
    matrices = {name: linear(name, tokens, rows, columns, form.weight_bytes) for name, rows, columns in shape.linears}
    yield rms_norm(shape, tokens)
    yield matrices["qkv"]
    yield rope(shape, tokens)
    yield kv_write(shape, tokens, form)
    yield attention(shape, step, form)
    yield matrices["output"]
    yield rms_norm(shape, tokens)
    yield matrices["gate_up"]
    yield silu_mul(shape, tokens)
    yield matrices["down"]


def last_kernels(shape: ModelShape, step: Step, form: Format) -> Iterator[Work]:
    """After the layers, for one row a sequence. A tied head is the embedding, which stays bfloat16."""
    weight_bytes = 2.0 if shape.tied else form.weight_bytes
    yield rms_norm(shape, step.sequences)
    yield linear("head", step.sequences, shape.vocab, shape.hidden, weight_bytes)
    yield sampling(shape, step.sequences)


def step_kernels(shape: ModelShape, step: Step, form: Format) -> list[Work]:
    """All kernels of a step."""
    return [*layer_kernels(shape, step, form)] * shape.layers + [*last_kernels(shape, step, form)]


def memory_bytes(shape: ModelShape, step: Step, form: Format) -> float:
    """Weights and cache; activations are small beside them."""
    embedding = 0 if shape.tied else shape.vocab * shape.hidden * 2
    cache = step.sequences * step.context * shape.layers * kv_token_bytes(shape, form)
    return shape.linear_weights * form.weight_bytes + embedding + cache


STEPS = (
    *(Step(sequences=1, new=n, context=n) for n in (1024, 8192)),
    *(Step(sequences=b, new=1, context=c) for c in (1024, 8192) for b in (1, 16, 64, 256)),
)


def step_table(chip: Chip, shapes: Sequence[ModelShape], steps: Sequence[Step]) -> list[str]:
    lines = [
        "| model | step | format | GB moved | TFLOP | floor ms | bound | expected ms | tokens/s | memory GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        for step in steps:
            lines += [_step_row(chip, shape, step, form) for form in FORMATS]
    return lines


def _step_row(chip: Chip, shape: ModelShape, step: Step, form: Format) -> str:
    kernels = step_kernels(shape, step, form)
    expected = expected_s(chip, kernels)
    needed = memory_bytes(shape, step, form)
    fits = "" if needed <= chip.memory_bytes else ": too much"
    cells = (
        *(shape.name, step.name, form.name),
        f"{sum(each.num_bytes for each in kernels) / 1e9:.3g}",
        f"{sum(each.flops for each in kernels) / 1e12:.3g}",
        f"{floor_s(chip, kernels) * 1e3:.3g}",
        bound(chip, kernels),
        f"{expected * 1e3:.3g}",
        f"{step.tokens / expected:,.0f}",
        f"{needed / 1e9:.3g}{fits}",
    )
    return f"| {' | '.join(cells)} |"


def kernel_table(chip: Chip, shape: ModelShape, steps: Sequence[Step], form: Format) -> list[str]:
    """One layer's kernels and the last ones."""
    lines = [
        "| step | kernel | MB | GFLOP | floor us | bound | efficiency | expected us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        for work in (*layer_kernels(shape, step, form), *last_kernels(shape, step, form)):
            cells = (
                *(step.name, work.name),
                f"{work.num_bytes / 1e6:.3g}",
                f"{work.flops / 1e9:.3g}",
                f"{work.floor_s(chip) * 1e6:.3g}",
                work.bound(chip),
                f"{work.efficiency(chip):.2f}",
                f"{work.expected_s(chip) * 1e6:.3g}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def document() -> str:
    """The tables between the markers of docs/gpu.md."""
    shown = (Step(sequences=1, new=8192, context=8192), *(Step(sequences=b, new=1, context=8192) for b in (1, 64)))
    lines = [
        f"### Whole steps, {H200.name}, predicted, not measured",
        "",
        *step_table(H200, (SMOLLM2_135M, LLAMA_3_8B, LLAMA_3_70B), STEPS),
        "",
        f"### Kernels of {LLAMA_3_8B.name}, {H200.name}, bf16, predicted, not measured",
        "",
        *kernel_table(H200, LLAMA_3_8B, shown, BFLOAT16),
    ]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The document `text` with today's tables. Raises ValueError without the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{document()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {DOCUMENT.name}")
    arguments = parser.parse_args()
    if arguments.write:
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
    else:
        print(document())


if __name__ == "__main__":
    main()
