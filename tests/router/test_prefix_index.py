"""What is believed to be cached where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index import CHUNK_TOKENS, PrefixIndex, chunk_hashes


def test_a_hash_covers_everything_before_it_and_the_salt() -> None:
    base = chunk_hashes(range(48), "")
    assert len(base) == 3
    assert chunk_hashes(range(47), "") == base[:2]
    changed = chunk_hashes([99, *range(1, 48)], "")
    assert not set(base) & set(changed)
    assert not set(base) & set(chunk_hashes(range(48), "tenant"))


def test_only_the_common_beginning_counts() -> None:
    index = PrefixIndex()
    index.record("p", "e1", chunk_hashes(range(100), ""))
    assert index.cached_tokens("p", "e1", chunk_hashes(range(100), "")) == 96
    assert index.cached_tokens("p", "e1", chunk_hashes([*range(40), *range(500, 600)], "")) == 32
    assert index.cached_tokens("q", "e1", chunk_hashes(range(100), "")) == 0


def test_a_new_epoch_knows_nothing() -> None:
    index = PrefixIndex()
    hashes = chunk_hashes(range(32), "")
    index.record("p", "e1", hashes)
    assert index.cached_tokens("p", "e2", hashes) == 0
    index.record("p", "e2", hashes[:1])
    assert index.cached_tokens("p", "e2", hashes) == CHUNK_TOKENS
    index.forget("p", "e1")
    assert len(index) == 1, "the newer incarnation stays"
    index.forget("p", "e2")
    assert len(index) == 0
    index.check_invariants()


def test_ends_are_forgotten_before_beginnings() -> None:
    index = PrefixIndex(max_entries=3)
    hashes = chunk_hashes(range(64), "")
    index.record("p", "e1", hashes)
    assert index.cached_tokens("p", "e1", hashes) == 3 * CHUNK_TOKENS


@given(st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from(["e1", "e2"]), st.integers(0, 80)), max_size=20))
def test_bounded_and_never_wrong_about_the_epoch(records: list[tuple[str, str, int]]) -> None:
    index = PrefixIndex(max_entries=6)
    for pod_id, epoch, length in records:
        index.record(pod_id, epoch, chunk_hashes(range(length), ""))
        index.check_invariants()
        assert index.cached_tokens(pod_id, epoch, chunk_hashes(range(length), "")) <= length
        assert index.cached_tokens(pod_id, "e3", chunk_hashes(range(length), "")) == 0


def test_broken_invariants_are_found() -> None:
    index = PrefixIndex()
    index.record("p", "e1", chunk_hashes(range(16), ""))
    index._epochs.clear()
    with pytest.raises(AssertionError, match="without an epoch"):
        index.check_invariants()
