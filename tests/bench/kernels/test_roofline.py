from __future__ import annotations

import pytest

from bench.kernels.model_shapes import GEMMA_2_9B, LLAMA_3_8B, LLAMA_3_70B, SMOLLM2_135M, ModelShape
from bench.kernels.roofline import (
    BFLOAT16,
    DOCUMENT,
    FORMATS,
    GAP_S,
    H200,
    INT4_KV8,
    KV8,
    STEPS,
    Step,
    attention,
    bound,
    expected_s,
    floor_s,
    kv_token_bytes,
    linear,
    memory_bytes,
    step_kernels,
    with_tables,
)

DECODE = Step(sequences=16, new=1, context=1024)
PREFILL = Step(sequences=1, new=1024, context=1024)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [(SMOLLM2_135M, 134.5e6), (LLAMA_3_8B, 8.03e9), (LLAMA_3_70B, 70.55e9), (GEMMA_2_9B, 9.24e9)],
)
def test_shapes_have_their_models_parameters(shape: ModelShape, parameters: float) -> None:
    """Published counts, norms apart; an embedding that is not the head is not in linear_weights."""
    embedding = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.linear_weights + embedding == pytest.approx(parameters, rel=0.003)


def test_a_linear_by_hand() -> None:
    one = linear("x", 1, 4096, 4096, 2)
    assert one.num_bytes == 4096 * 4096 * 2 + 2 * 4096 * 2
    assert one.flops == 2 * 4096 * 4096
    assert one.bound(H200) == "memory"
    assert one.floor_s(H200) == pytest.approx(33.57e6 / 4.8e12, rel=0.001)
    many = linear("x", 8192, 4096, 4096, 2)
    assert many.bound(H200) == "compute"
    assert many.floor_s(H200) == pytest.approx(2 * 8192 * 4096 * 4096 / 989.5e12)


def test_the_cache_of_a_token_by_hand() -> None:
    assert kv_token_bytes(LLAMA_3_8B, BFLOAT16) == 2 * 8 * 128 * 2
    assert kv_token_bytes(LLAMA_3_8B, KV8) == 2 * 8 * (128 + 4)


def test_attention_by_hand() -> None:
    decode = attention(LLAMA_3_8B, DECODE, BFLOAT16)
    assert decode.num_bytes == 16 * 1024 * 4096 + 2 * 16 * 32 * 128 * 2
    assert decode.flops == 16 * 1024 * 32 * 128 * 4
    prefill = attention(LLAMA_3_8B, PREFILL, BFLOAT16)
    assert prefill.flops == 4 * 32 * 128 * (1024 * 1025 / 2)
    chunk = attention(LLAMA_3_8B, Step(sequences=1, new=24, context=1024), BFLOAT16)
    assert chunk.flops == 4 * 32 * 128 * (24 * 1000 + 24 * 25 / 2)


def test_a_window_bounds_what_decode_reads() -> None:
    far = attention(GEMMA_2_9B, Step(sequences=1, new=1, context=8192), BFLOAT16)
    window = attention(GEMMA_2_9B, Step(sequences=1, new=1, context=4096), BFLOAT16)
    assert far == window


def test_a_decode_step_reads_every_weight_once() -> None:
    kernels = step_kernels(LLAMA_3_8B, Step(sequences=1, new=1, context=1), BFLOAT16)
    weights = LLAMA_3_8B.linear_weights * 2
    total = sum(work.num_bytes for work in kernels)
    assert weights < total < 1.01 * weights
    assert bound(H200, kernels) == "memory"
    assert floor_s(H200, kernels) == pytest.approx(total / H200.bytes_per_s)


@pytest.mark.parametrize("shape", [SMOLLM2_135M, LLAMA_3_8B, LLAMA_3_70B])
@pytest.mark.parametrize("step", STEPS)
def test_smaller_formats_are_never_slower_and_expectations_never_below_floors(shape: ModelShape, step: Step) -> None:
    floors = {form.name: floor_s(H200, step_kernels(shape, step, form)) for form in FORMATS}
    assert floors[INT4_KV8.name] <= min(floors.values())
    for form in FORMATS:
        kernels = step_kernels(shape, step, form)
        gaps = sum(work.launches for work in kernels) * GAP_S
        assert expected_s(H200, kernels) > floor_s(H200, kernels) + gaps
        assert memory_bytes(shape, step, form) > 0


def test_a_long_prefill_is_bound_by_compute() -> None:
    kernels = step_kernels(LLAMA_3_8B, Step(sequences=1, new=8192, context=8192), BFLOAT16)
    assert bound(H200, kernels) == "compute"
    matrices = 2 * 8192 * (LLAMA_3_8B.linear_weights - LLAMA_3_8B.vocab * LLAMA_3_8B.hidden)
    assert sum(work.flops for work in kernels) == pytest.approx(
        matrices + 32 * 4 * 32 * 128 * (8192 * 8193 / 2), rel=0.001
    )


def test_a_tied_head_stays_as_the_embedding_is() -> None:
    heads = [work for work in step_kernels(SMOLLM2_135M, DECODE, INT4_KV8) if work.name == "head"]
    assert heads == [linear("head", 16, SMOLLM2_135M.vocab, SMOLLM2_135M.hidden, 2)]


def test_the_document_has_todays_tables() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text) == text, "python -m bench.kernels.roofline --write"


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpu\.md lacks <!-- roofline: begin -->"):
        with_tables("# GPU\n")
