from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sequence import SamplingParams
from engine.speculation.ngram import TOKENS_PER_STEP, NgramIndex, NgramProposer
from engine.speculation.proposer import DraftRequest


def propose(token_ids: list[int], count: int = 3, min_n: int = 2, max_n: int = 4) -> tuple[int, ...]:
    index = NgramIndex(min_n, max_n)
    assert index.extend(token_ids)
    return index.propose(token_ids, count)


@pytest.mark.parametrize(
    ("token_ids", "guess"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], (3, 4, 5)),
        ([1, 2, 3, 8, 1, 2, 4, 7, 1, 2], (4, 7, 1)),  # the later of two occurrences
        ([5, 1, 2, 3, 8, 6, 1, 2, 4, 7, 5, 1, 2], (3, 8, 6)),  # the longer match, though it is earlier
        ([1, 2, 3, 4], ()),
        ([1, 2, 3, 2], ()),  # one token is no match
        ([7, 7, 7, 7], (7, 7, 7)),
        ([9, 1, 2, 1, 2], (1, 2, 1)),  # goes on with its period
        ([1], ()),
        ([1, 2], ()),
    ],
)
def test_by_hand(token_ids: list[int], guess: tuple[int, ...]) -> None:
    assert propose(token_ids) == guess


def by_scanning(token_ids: list[int], count: int, min_n: int, max_n: int) -> tuple[int, ...]:
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                guess = list(token_ids)
                for i in range(count):
                    guess.append(guess[start + n + i])
                return tuple(guess[len(token_ids) :])
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_an_index_that_grows_says_what_a_scan_says(token_ids: list[int], count: int, min_n: int, more: int) -> None:
    index = NgramIndex(min_n, min_n + more)
    for end in range(1, len(token_ids) + 1, 1 + more):
        seen = token_ids[:end]
        assert index.extend(seen)
        assert index.propose(seen, count) == by_scanning(seen, count, min_n, min_n + more)


def request(token_ids: list[int], num_drafts: int = 2, sequence_id: str = "a") -> DraftRequest:
    return DraftRequest(sequence_id, token_ids, len(token_ids), SamplingParams(), (), num_drafts)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    proposer = NgramProposer(2, 4)
    token_ids = [*range(2 * TOKENS_PER_STEP), 5, 6, 7]
    assert [proposer.propose([request(token_ids)]) for _ in range(3)] == [[()], [()], [(8, 9)]]


def test_sequences_are_apart_and_can_be_forgotten() -> None:
    proposer = NgramProposer(1, 2)
    assert proposer.propose([request([1, 2, 1]), request([1, 3, 1], sequence_id="b")]) == [(2, 1), (3, 1)]
    proposer.forget("a")
    proposer.forget("unknown")
    assert proposer.propose([request([4, 5, 4])]) == [(5, 4)]


def test_a_step_does_not_depend_on_the_context() -> None:
    """Microseconds at 8,000 tokens: far below what looking at each of them once would take."""
    proposer = NgramProposer(2, 4)
    token_ids = [i * 7919 % 5003 for i in range(8000)]
    for _ in range(9):
        proposer.propose([request(token_ids)])
    started_at = time.thread_time()
    for step in range(1000):
        token_ids.append(step % 17)
        proposer.propose([request(token_ids)])
    assert time.thread_time() - started_at < 0.1  # 100 us a step; measured: 4


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 3), (3, 2)])
def test_sizes_out_of_range_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match=f"ngram_min = {min_n}, ngram_max = {max_n}: must be 1 <= "):
        NgramProposer(min_n, max_n)
