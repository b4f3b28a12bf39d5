from __future__ import annotations

import numpy as np
import pytest

from engine.speculation.draft_kv import DraftSlots

TABLE = (5, 2, 7)


@pytest.fixture
def generations() -> np.ndarray:
    return np.array([3, 1, 4, 1, 5, 9, 2, 6], np.uint64)


@pytest.fixture
def slots(generations: np.ndarray) -> DraftSlots:
    return DraftSlots(generations, block_size=4)


def test_nothing_is_ready_before_it_was_written(slots: DraftSlots) -> None:
    assert slots.num_ready(TABLE, 9) == 0


def test_what_was_written_is_ready_and_no_more(slots: DraftSlots) -> None:
    slots.wrote(TABLE, 0, 6)
    assert [slots.num_ready(TABLE, count) for count in (4, 6, 9, 12)] == [4, 6, 6, 6]
    slots.wrote(TABLE, 6, 12)
    assert slots.num_ready(TABLE, 12) == 12


def test_a_block_with_a_new_owner_is_to_be_written_again(slots: DraftSlots, generations: np.ndarray) -> None:
    slots.wrote(TABLE, 0, 10)
    generations[2] += 1
    assert slots.num_ready(TABLE, 10) == 4
    slots.wrote(TABLE, 4, 6)
    assert slots.num_ready(TABLE, 10) == 6
    slots.wrote(TABLE, 6, 8)
    assert slots.num_ready(TABLE, 10) == 10  # the third block is as it was


def test_sequences_share_what_their_shared_blocks_hold(slots: DraftSlots) -> None:
    slots.wrote((5, 2), 0, 8)
    assert slots.num_ready((5, 2, 1), 11) == 8
    assert slots.num_ready((5, 3, 1), 11) == 4


def test_writing_nothing_changes_nothing(slots: DraftSlots) -> None:
    slots.wrote(TABLE, 0, 6)
    slots.wrote(TABLE, 6, 6)
    slots.wrote(TABLE, 0, 0)
    assert slots.num_ready(TABLE, 12) == 6


def test_generations_may_be_a_list() -> None:
    slots = DraftSlots([0, 0], block_size=4)
    slots.wrote((1, 0), 0, 5)
    assert slots.num_ready((1, 0), 8) == 5
