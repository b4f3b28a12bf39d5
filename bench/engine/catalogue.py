"""The goals of this bench by name, the cases that they need, and the arms that each case runs on."""

from __future__ import annotations

from collections.abc import Sequence

from bench.bars import Op
from bench.engine.cases import PREFILL_LENGTHS
from bench.engine.goals import Goal, Key, ratio

LINEAR_FLOPS = 2 * 106_168_320  # of one prompt token in the default model's layers; the head runs for the last alone
CHUNKS = (32, 64, 128)  # tokens a step among which vLLM's best is looked for

OURS = ("ours", "ours_int8", "ours_int4", "ours_pd", "ours_pd_unpinned")
VLLM_CHUNKS = {f"vllm_chunk{size}": size for size in CHUNKS}
LLAMA_KINDS = {"llama_cpp_f16": "F16", "llama_cpp_q4_0": "Q4_0", "llama_cpp_q4_1": "Q4_1"}
ARMS = (*OURS, "vllm", *VLLM_CHUNKS, "vllm_pd", *LLAMA_KINDS, "hf_float32", "limits")

# Cases of one phase share the started arms; several phases, so that memory suffices for each.
PHASES: tuple[tuple[str, ...], ...] = (
    ("single", "eight", "streams", "prefill", "memory"),
    ("pd", "steady"),
    ("chunks",),
)
CASE_ARMS: dict[str, tuple[str, ...]] = {
    "single": ("limits", "ours", "ours_int4", "vllm", *LLAMA_KINDS, "hf_float32"),
    "eight": ("ours",),
    "streams": ("ours", "ours_int8", "vllm", "llama_cpp_f16", "hf_float32"),
    "prefill": ("limits", "ours", "vllm", "llama_cpp_f16", "hf_float32"),
    "memory": ("ours", "vllm", "llama_cpp_f16"),
    "pd": ("ours_pd", "ours_pd_unpinned", "ours", "vllm_pd", "llama_cpp_f16"),
    "steady": ("ours_pd", "ours", "vllm_pd", "llama_cpp_f16"),
    "chunks": ("ours_pd", *VLLM_CHUNKS),
}


def against(name: str, metric: str, ours: str, peer: str, op: Op = ">=", threshold: float | None = None) -> Goal:
    """Ours by a peer's, of one metric."""
    return Goal(name=f"engine_{name}", needs=((ours, metric), (peer, metric)), value=ratio, op=op, threshold=threshold)


def goals(chunk_arms: Sequence[str]) -> list[Goal]:
    """`chunk_arms`: vLLM's colocated arms that ran, of which the best counts; none: all."""
    steady, streams = "steady.itl_p99_ms", "streams.tok_s"
    chunks: tuple[Key, ...] = tuple((arm, steady) for arm in chunk_arms or VLLM_CHUNKS)
    return [
        against("single_bf16_to_vllm", "single.tok_s", "ours", "vllm", ">=", 2.0),
        Goal(
            name="engine_single_bf16_share_of_read",
            needs=(("limits", "limits.read_s"), ("ours", "single.tok_s")),
            value=lambda read_s, tok_s: read_s * tok_s,
            threshold=0.75,
        ),
        Goal(
            name="engine_single_int4_to_llama_cpp_q4",
            needs=(
                ("ours_int4", "single.tok_s"),
                ("llama_cpp_q4_0", "single.tok_s"),
                ("llama_cpp_q4_1", "single.tok_s"),
            ),
            value=lambda ours, *peers: ours / max(peers),
            threshold=1.4,
        ),
        against("streams_bf16_to_vllm", streams, "ours", "vllm", ">=", 1.8),
        against("streams_int8_to_vllm", streams, "ours_int8", "vllm", ">=", 2.5),
        against("prefill_1024_to_vllm", "prefill1024.tok_s", "ours", "vllm", ">=", 1.6),
        Goal(
            name="engine_prefill_1024_share_of_matmul",
            needs=(("ours", "prefill1024.tok_s"), ("limits", "limits.matmul_flops")),
            value=lambda tok_s, flops: tok_s * LINEAR_FLOPS / flops,
            threshold=0.5,
        ),
        against("prefill_4096_to_vllm", "prefill4096.tok_s", "ours", "vllm", ">=", 1.25),
        against("pd_streams_to_vllm_pd", streams, "ours_pd", "vllm_pd", ">=", 2.2),
        Goal(
            name="engine_pd_itl_p99_to_vllm_colocated",
            needs=(("ours_pd", steady), *chunks),
            value=lambda ours, *peers: ours / min(peers),
            op="<=",
            threshold=1 / 3,
        ),
        against("pd_itl_p99_to_vllm_pd", steady, "ours_pd", "vllm_pd", "<=", 0.5),
        Goal(
            name="engine_growth_1_to_8_streams",
            needs=(("ours", "eight.growth"),),
            value=float,
            op="<=",
            threshold=1.25,
        ),
        against("memory_of_a_pod_to_vllm", "memory.mb", "ours", "vllm", "<=", 0.5),
        *informative(),
    ]


def informative() -> list[Goal]:
    """Against peers that the goals do not name; no verdict."""
    lines = [
        against(f"{metric.split('.')[0]}_bf16_to_{peer}", metric, "ours", peer)
        for peer in ("llama_cpp_f16", "hf_float32")
        for metric in ("single.tok_s", "streams.tok_s", *(f"prefill{length}.tok_s" for length in PREFILL_LENGTHS))
    ]
    pd = [
        against(f"pd_{name}_to_{peer}", metric, "ours_pd", peer)
        for peer in ("ours", "llama_cpp_f16")
        for name, metric in (("streams", "streams.tok_s"), ("itl_p99", "steady.itl_p99_ms"))
    ]
    pd.append(against("pd_streams_to_ours_pd_unpinned", "streams.tok_s", "ours_pd", "ours_pd_unpinned"))
    return [*lines, *pd, against("memory_of_a_pod_to_llama_cpp_f16", "memory.mb", "ours", "llama_cpp_f16")]
