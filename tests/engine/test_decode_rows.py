"""Batches in memory that is used again, against those that are made anew."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledSequence
from engine.decode_rows import TABLE_STEP, DecodeRows, DecodeSteps, Step, only_decodes
from engine.runner import flatten
from engine.sequence import SamplingParams
from kernels.flat_batch import FlatBatch

BLOCK_SIZE = 4


def decode(token_id: int, start: int, table: tuple[int, ...]) -> ScheduledSequence:
    return ScheduledSequence("s", (token_id,), start, table, True, SamplingParams(temperature=0.0), (), ())


@st.composite
def decodes(draw: st.DrawFn) -> ScheduledSequence:
    start = draw(st.integers(0, 2 * TABLE_STEP * BLOCK_SIZE))
    table = draw(st.lists(st.integers(0, 99), min_size=start // BLOCK_SIZE + 1, max_size=start // BLOCK_SIZE + 2))
    return decode(draw(st.integers(0, 9)), start, tuple(table))


def assert_equal(actual: FlatBatch, expected: FlatBatch, sequences: list[ScheduledSequence]) -> None:
    for field in fields(FlatBatch):
        if "tables" not in field.name:
            assert torch.equal(getattr(actual, field.name), getattr(expected, field.name)), field.name
    for row, sequence in zip(actual.decode_block_tables.tolist(), sequences, strict=True):
        assert tuple(row[: len(sequence.block_table)]) == sequence.block_table


@given(steps=st.lists(st.lists(decodes(), min_size=1, max_size=4), max_size=6))
@settings(deadline=None)
def test_every_step_is_what_flatten_makes(steps: list[list[ScheduledSequence]]) -> None:
    rows = DecodeRows(BLOCK_SIZE)
    for sequences in steps:
        assert_equal(rows.batch(sequences), flatten(sequences, BLOCK_SIZE), sequences)


def test_a_step_of_the_same_size_uses_the_same_memory() -> None:
    rows = DecodeRows(BLOCK_SIZE)
    first = rows.batch([decode(1, 2, (7,)), decode(2, 5, (3, 8))])
    second = rows.batch([decode(3, 3, (7,)), decode(4, 6, (3, 8))])
    assert second is first
    assert second.token_ids.tolist() == [3, 4]
    assert second.decode_context_lens.tolist() == [4, 7]


def test_a_table_that_grows_or_changes_is_copied() -> None:
    rows = DecodeRows(BLOCK_SIZE)
    for table in ((7,), (7, 9), (5, 9), (5,), tuple(range(TABLE_STEP + 1))):
        assert tuple(rows.batch([decode(1, 0, table)]).decode_block_tables[0, : len(table)].tolist()) == table


def test_a_step_is_prepared_once_for_a_number_of_rows() -> None:
    """Logits that make each sequence's next token the one after its last."""
    prepared: list[int] = []

    def prepare(batch: FlatBatch) -> Step:
        prepared.append(batch.num_tokens)
        logits = torch.zeros(batch.num_tokens, 10)

        def compute() -> torch.Tensor:
            return logits.zero_().scatter_(1, batch.token_ids[:, None] + 1, 1.0)

        return compute

    steps = DecodeSteps(BLOCK_SIZE, prepare, frozenset())
    for token_ids in ((1, 2), (3, 8), (4,), (5,), (6, 7)):
        drawn = steps.tokens([decode(token_id, 2, (7,)) for token_id in token_ids])
        assert [token.token_id for token in drawn] == [token_id + 1 for token_id in token_ids]
    assert prepared == [2, 1, 2]


@pytest.mark.parametrize("change", [{"token_ids": (1, 2)}, {"sample": False}, {"draft_ids": (5,)}])
def test_what_is_more_than_a_decode_is_told(change: dict[str, Any]) -> None:
    plain = decode(1, 2, (7,))
    assert only_decodes([plain, plain])
    assert not only_decodes([plain, plain._replace(**change)])
