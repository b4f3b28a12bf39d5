"""One call for many stages against the ops one by one: the same bits, on every instruction set."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decoder import forward, prepared, run_stages
from kernels.flat_batch import FlatBatch
from tests.kernels.backends import every_cpu, using
from tests.kernels.decoder_cases import (
    BFLOAT16,
    BLOCK_SIZE,
    FLOAT32,
    NUM_BLOCKS,
    NUM_POSITIONS,
    VOCAB,
    Shape,
    copied,
    make_batch,
    make_caches,
    make_decoder,
    make_ends,
    make_linear,
    random_stream,
    same_caches,
    shapes,
)
from tests.kernels.quantized_cases import Format


@every_cpu
@given(
    shape=shapes,
    decodes=st.lists(st.integers(1, 30), max_size=4).map(tuple),
    prefills=st.lists(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 20))), max_size=2).map(
        tuple
    ),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_gives_the_bits_of_the_single_ops(
    implementation: str,
    shape: Shape,
    decodes: tuple[int, ...],
    prefills: tuple[tuple[int, int], ...],
    threads: int,
    seed: int,
) -> None:
    if not decodes and not prefills:
        decodes = (3,)
    torch.manual_seed(seed)
    decoder, batch, caches = make_decoder(shape), make_batch(decodes, prefills), make_caches(shape)
    stream, expected_caches = random_stream(shape, batch), copied(caches)
    with using(implementation) as backend:
        torch.set_num_threads(1)
        expected = run_stages(decoder, 0, 4, *stream, batch, expected_caches, backend="reference")
        torch.set_num_threads(threads)
        given_stream = [tensor.clone() for tensor in stream]
        actual = run_stages(decoder, 0, 4, *stream, batch, caches, backend=backend)
    for name, got, want, before, now in zip(("delta", "residual"), actual, expected, given_stream, stream, strict=True):
        assert torch.equal(got, want), f"{name} differs by up to {(got - want).abs().max()}"
        assert torch.equal(before, now), f"{name} was changed in place"
    assert same_caches(caches, expected_caches)


@every_cpu
@given(
    shape=shapes,
    scale=st.sampled_from([1.0, 6.5]),
    decodes=st.lists(st.integers(1, 30), max_size=4).map(tuple),
    prefill=st.sampled_from([(), ((7, 9),)]),
    threads=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_whole_step_gives_the_bits_of_its_parts(
    implementation: str,
    shape: Shape,
    scale: float,
    decodes: tuple[int, ...],
    prefill: tuple[tuple[int, int], ...],
    threads: int,
    data: st.DataObject,
) -> None:
    if not decodes and not prefill:
        decodes = (3,)
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    decoder, ends, batch, caches = (
        make_decoder(shape),
        make_ends(shape, scale),
        make_batch(decodes, prefill),
        make_caches(shape),
    )
    rows = data.draw(st.lists(st.integers(0, batch.num_tokens - 1), unique=True))
    batch, expected_caches = replace(batch, sample_rows=torch.tensor(rows, dtype=torch.int64)), copied(caches)
    with using(implementation) as backend:
        torch.set_num_threads(1)
        expected = forward(decoder, ends, batch, expected_caches, backend="reference")
        torch.set_num_threads(threads)
        actual = forward(decoder, ends, batch, caches, backend=backend)
    assert torch.equal(actual, expected), f"logits differ by up to {(actual - expected).abs().max()}"
    assert same_caches(caches, expected_caches)


@every_cpu
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("gate_up_as_one", [False, True])
@pytest.mark.parametrize("quantized", [None, Format(8, None), Format(4, 32, torch.float16)])
def test_blocks_of_rows_have_the_bits_of_the_single_ops(
    implementation: str, dtype: torch.dtype, gate_up_as_one: bool, quantized: Format | None
) -> None:
    """150 rows are more than one block of every instruction set's, at this depth."""
    shape = Shape(hidden=2048, inner=80, dtype=dtype, gate_up_as_one=gate_up_as_one, quantized=quantized)
    decoder, batch, caches = make_decoder(shape), make_batch((), ((50, 50),) * 3), make_caches(shape)
    stream, expected_caches = random_stream(shape, batch), copied(caches)
    with using(implementation) as backend:
        expected = run_stages(decoder, 0, 4, *stream, batch, expected_caches, backend="reference")
        actual = run_stages(decoder, 0, 4, *stream, batch, caches, backend=backend)
    assert all(map(torch.equal, actual, expected))
    assert same_caches(caches, expected_caches)


@pytest.mark.parametrize("experts", [False, True])
def test_stage_by_stage_is_all_at_once(experts: bool) -> None:
    shape = Shape(sandwich_norms=True, experts=experts)
    decoder, batch, caches = make_decoder(shape), make_batch((5, 9), ((7, 7),)), make_caches(shape)
    stream, others = random_stream(shape, batch), copied(caches)
    at_once = run_stages(decoder, 0, 4, *stream, batch, others)
    for stage in range(4):
        stream = run_stages(decoder, stage, stage + 1, *stream, batch, caches)
    assert all(map(torch.equal, stream, at_once))
    assert same_caches(caches, others)


def test_a_row_does_not_depend_on_the_batch() -> None:
    shape = Shape(hidden=64, inner=128)
    decoder, caches = make_decoder(shape), make_caches(shape)
    batch = make_batch((5, 9, 1, 17), ((7, 9),))
    delta, residual = random_stream(shape, batch)
    whole = run_stages(decoder, 0, 4, delta, residual, batch, copied(caches))
    for row in range(4):
        alone = replace(
            batch,
            token_ids=batch.token_ids[:1],
            positions=batch.positions[row : row + 1],
            slot_mapping=batch.slot_mapping[row : row + 1],
            decode_block_tables=batch.decode_block_tables[row : row + 1],
            decode_context_lens=batch.decode_context_lens[row : row + 1],
            prefill_block_tables=batch.prefill_block_tables[:0],
            prefill_context_lens=batch.prefill_context_lens[:0],
            prefill_cu_seqlens=batch.prefill_cu_seqlens[:1],
        )
        one = slice(row, row + 1)
        got = run_stages(decoder, 0, 4, delta[one], residual[one], alone, copied(caches))
        assert torch.equal(got[0], whole[0][one])


@every_cpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([4, NUM_POSITIONS])}, "position 64 of token 1"),
        ({"slot_mapping": torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE])}, "slot 160 of token 1"),
        ({"decode_context_lens": torch.tensor([5, 400], dtype=torch.int32)}, "context of sequence 1"),
        ({"decode_block_tables": torch.tensor([[1, 2, 3], [1, -1, 40]], dtype=torch.int32)}, "context of sequence 1"),
    ],
)
def test_refuses_what_leaves_a_table(implementation: str, change: dict[str, torch.Tensor], message: str) -> None:
    shape = Shape()
    decoder, batch, caches = make_decoder(shape), replace(make_batch((5, 9), ()), **change), make_caches(shape)
    with using(implementation) as backend, pytest.raises(IndexError, match=message):
        run_stages(decoder, 0, 4, *random_stream(shape, batch), batch, caches, backend=backend)


@every_cpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.tensor([0, VOCAB])}, "out of range"),
        ({"token_ids": torch.tensor([-1, 0])}, "out of range"),
        ({"sample_rows": torch.tensor([2])}, "out of bounds"),
        ({"positions": torch.tensor([4, NUM_POSITIONS])}, "position 64 of token 1"),
        ({"slot_mapping": torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE])}, "slot 160 of token 1"),
    ],
)
def test_a_whole_step_refuses_what_leaves_a_table(
    implementation: str, change: dict[str, torch.Tensor], message: str
) -> None:
    shape = Shape()
    decoder, batch, caches = make_decoder(shape), replace(make_batch((5, 9), ()), **change), make_caches(shape)
    with using(implementation) as backend, pytest.raises(IndexError, match=message):
        forward(decoder, make_ends(shape), batch, caches, backend=backend)


def test_a_whole_step_samples_a_row_as_often_as_it_is_asked_for() -> None:
    shape = Shape()
    decoder, ends, batch = make_decoder(shape), make_ends(shape), make_batch((5, 9), ())
    once = forward(decoder, ends, batch, caches := make_caches(shape))
    thrice = forward(decoder, ends, replace(batch, sample_rows=torch.tensor([1, 0, 1])), caches)
    assert torch.equal(thrice, once[[1, 0, 1]])


@every_cpu
@pytest.mark.parametrize("experts", [False, True])
def test_a_prepared_step_computes_what_its_batch_then_holds(implementation: str, experts: bool) -> None:
    shape = Shape(experts=experts)
    decoder, ends, caches = make_decoder(shape), make_ends(shape), make_caches(shape)
    batch, other, longer = make_batch((5, 9), ()), make_batch((8, 12), ()), make_batch((6,), ((30, 30),))
    with using(implementation) as backend:
        step = prepared(decoder, ends, batch, caches, backend=backend)
        for then in (batch, other):
            for field in fields(FlatBatch):
                getattr(batch, field.name).copy_(getattr(then, field.name))
            expected = forward(decoder, ends, then, copied(caches), backend=backend)
            assert torch.equal(step(), expected)
            forward(decoder, ends, longer, copied(caches), backend=backend)  # in more memory than the step has
        assert step() is step()


def test_ends_refuse_what_does_not_fit() -> None:
    shape = Shape()
    ends, batch, caches = make_ends(shape), make_batch((5,), ()), make_caches(shape)
    for change, error, message in (
        ({"embedding": torch.zeros(3, 41)}, ValueError, "embedding has shape"),
        ({"delta_norm": torch.ones(40).bfloat16()}, TypeError, "delta_norm has dtype"),
        ({"head": make_linear(shape, 41, VOCAB)}, ValueError, "head has 41 columns, expected the norm's 40"),
    ):
        with pytest.raises(error, match=message):
            replace(ends, **change)
    with pytest.raises(TypeError, match="norm has dtype"):
        forward(make_decoder(shape), replace(ends, norm=torch.ones(40).bfloat16()), batch, caches)
    with pytest.raises(ValueError, match="caches has 1 layers"):
        forward(make_decoder(shape), ends, batch, caches[:1])


def test_refuses_what_does_not_fit() -> None:
    shape = Shape()
    decoder, batch, caches = make_decoder(shape), make_batch((5,), ()), make_caches(shape)
    delta, residual = random_stream(shape, batch)
    for first, last in ((1, 5), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match="expected at least one of the decoder's 4"):
            run_stages(decoder, first, last, delta, residual, batch, caches)
    with pytest.raises(ValueError, match="residual has shape"):
        run_stages(decoder, 0, 4, delta, residual[:, 1:], batch, caches)
    with pytest.raises(TypeError, match="delta has dtype"):
        run_stages(decoder, 0, 4, delta.double(), residual, batch, caches)
    with pytest.raises(ValueError, match="caches has 1 layers"):
        run_stages(decoder, 0, 4, delta, residual, batch, caches[:1])
    with pytest.raises(ValueError, match="q has 4 heads, expected a multiple"):
        run_stages(decoder, 0, 4, delta, residual, batch, make_caches(replace(shape, num_kv_heads=3)))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (slice(0, 1), "expected two a layer"),
        (slice(1, 3), "expected attention first"),
    ],
)
def test_a_decoder_has_two_stages_a_layer(stages: slice, message: str) -> None:
    decoder = make_decoder(Shape())
    with pytest.raises(ValueError, match=message):
        replace(decoder, stages=decoder.stages[stages])


def test_a_decoder_refuses_weights_of_another_size() -> None:
    decoder = make_decoder(Shape())
    with pytest.raises(ValueError, match="qkv is"):
        replace(decoder, num_heads=3)
    with pytest.raises(TypeError, match="norm has dtype"):
        replace(decoder, stages=(*decoder.stages[:3], make_decoder(Shape(dtype=BFLOAT16)).stages[3]))
