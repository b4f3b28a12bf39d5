from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from engine.batch import BlockCopy
from engine.block_hash import extend_hashes
from engine.block_manager import BlockManager, Demand

BLOCK_SIZE = 2


def hashes_of(tokens: str) -> list[bytes]:
    """Of the full blocks of a sequence whose tokens are characters."""
    hashes: list[bytes] = []
    extend_hashes(hashes, b"", [ord(t) for t in tokens], block_size=BLOCK_SIZE, num_blocks=len(tokens) // BLOCK_SIZE)
    return hashes


def demand(
    tokens: str, *, max_cached_tokens: int | None = None, num_blocks: int | None = None, keep_free: int = 0
) -> Demand:
    return Demand(
        hashes=hashes_of(tokens),
        num_blocks=-(-len(tokens) // BLOCK_SIZE) if num_blocks is None else num_blocks,
        max_cached_tokens=len(tokens) - 1 if max_cached_tokens is None else max_cached_tokens,
        keep_free=keep_free,
    )


@pytest.fixture
def blocks() -> Iterator[BlockManager]:
    manager = BlockManager(6, BLOCK_SIZE)
    yield manager
    manager.check_invariants()


class Computed:
    """Computes whole sequences on a block manager."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._ids = count()

    def __call__(self, tokens: str, sequence_id: str | None = None) -> str:
        name = f"s{next(self._ids)}" if sequence_id is None else sequence_id
        num_cached = self._blocks.allocate(name, demand(tokens))
        assert num_cached is not None
        self._blocks.make_writable(name, num_cached, len(tokens))
        self._blocks.commit(name, hashes_of(tokens))
        return name


@pytest.fixture
def compute(blocks: BlockManager) -> Computed:
    return Computed(blocks)


def test_a_new_sequence_gets_fresh_blocks(blocks: BlockManager) -> None:
    assert blocks.allocate("a", demand("abcde")) == 0
    assert len(set(blocks.table("a"))) == 3
    assert blocks.num_free == 3
    assert blocks.owners == {"a"}


def test_too_few_free_blocks_change_nothing(blocks: BlockManager) -> None:
    blocks.allocate("a", demand("abcdefgh"))
    assert blocks.allocate("b", demand("xyxyx")) is None
    assert blocks.owners == {"a"}
    assert blocks.num_free == 2


def test_keep_free_is_left_over(blocks: BlockManager) -> None:
    assert blocks.allocate("a", demand("abcdefgh", keep_free=3)) is None
    assert blocks.allocate("a", demand("abcdefgh", keep_free=2)) == 0
    assert blocks.num_free == 2


def test_one_table_an_owner(blocks: BlockManager) -> None:
    blocks.allocate("a", demand("ab"))
    with pytest.raises(ValueError, match="'a'"):
        blocks.allocate("a", demand("ab"))


def test_blocks_are_matched_only_after_commit(blocks: BlockManager) -> None:
    blocks.allocate("a", demand("abcdX"))
    assert blocks.match(hashes_of("abcd")) == []
    blocks.commit("a", hashes_of("ab"))
    assert blocks.match(hashes_of("abcd")) == [blocks.table("a")[0]]


def test_a_running_sequence_shares_its_prefix(blocks: BlockManager, compute: Computed) -> None:
    compute("abcdX", "a")
    assert blocks.allocate("b", demand("abcdY")) == 4
    assert blocks.table("b")[:2] == blocks.table("a")[:2]
    assert blocks.num_free == 2
    blocks.free("a")
    assert blocks.num_free == 3  # only its own last block


def test_a_freed_prefix_stays_cached_and_is_matched_again(blocks: BlockManager, compute: Computed) -> None:
    table = blocks.table(compute("abcdX", "a"))
    blocks.free("a")
    assert (blocks.num_free, blocks.num_cached) == (6, 2)
    assert blocks.allocate("b", demand("abcdYZ")) == 4
    assert blocks.table("b")[:2] == table[:2]


def test_children_are_evicted_before_their_parents(blocks: BlockManager, compute: Computed) -> None:
    blocks.free(compute("abcdefgh"))
    blocks.allocate("x", demand("....", num_blocks=3))
    assert len(blocks.match(hashes_of("abcdefgh"))) == 3
    blocks.allocate("y", demand("....", num_blocks=1))
    assert len(blocks.match(hashes_of("abcdefgh"))) == 2


def test_the_least_recently_used_prefix_is_evicted_first(blocks: BlockManager, compute: Computed) -> None:
    blocks.free(compute("abcd"))
    blocks.free(compute("pqrs"))
    blocks.free(compute("abcd"))
    blocks.allocate("x", demand("....", num_blocks=4))
    assert len(blocks.match(hashes_of("abcd"))) == 2
    assert blocks.match(hashes_of("pqrs")) == []


def test_a_full_hit_copies_the_last_block_and_leaves_one_token(blocks: BlockManager, compute: Computed) -> None:
    source = blocks.table(compute("abcd", "a"))[1]
    assert blocks.allocate("b", demand("abcd")) == 3
    [copy] = blocks.make_writable("b", 3, 4)
    assert copy == BlockCopy(source, blocks.table("b")[1])
    assert copy.target != source
    assert blocks.table("a")[1] == source


def test_a_cached_block_without_owner_is_not_written_either(blocks: BlockManager, compute: Computed) -> None:
    source = blocks.table(compute("abcd", "a"))[1]
    blocks.free("a")
    blocks.allocate("b", demand("abcd"))
    assert blocks.make_writable("b", 3, 4) == [BlockCopy(source, blocks.table("b")[1])]
    assert blocks.match(hashes_of("abcd"))[1] == source


def test_a_full_hit_without_a_block_for_the_copy_computes_the_last_block_again() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    Computed(blocks)("abcd", "a")
    blocks.free("a")
    assert blocks.allocate("b", demand("abcd")) == 2
    assert blocks.make_writable("b", 2, 4) == []
    blocks.check_invariants()


def test_a_receiver_needs_no_copy_on_a_full_hit(blocks: BlockManager, compute: Computed) -> None:
    compute("abcd", "a")
    assert blocks.allocate("b", demand("abcd", max_cached_tokens=4, num_blocks=3)) == 4
    assert blocks.table("b")[:2] == blocks.table("a")


def test_private_blocks_are_written_in_place(blocks: BlockManager) -> None:
    blocks.allocate("a", demand("abc"))
    assert blocks.make_writable("a", 0, 3) == []


def test_of_two_that_compute_the_same_block_the_second_takes_over_the_first_ones(blocks: BlockManager) -> None:
    for owner in ("a", "b"):
        blocks.allocate(owner, demand("abX"))
    blocks.commit("a", hashes_of("ab"))
    blocks.commit("b", hashes_of("ab"))
    assert blocks.table("a")[0] == blocks.table("b")[0]
    assert blocks.table("a")[1] != blocks.table("b")[1]
    assert blocks.num_free == 3


def test_a_child_never_outlives_its_parent_even_after_duplicates(blocks: BlockManager) -> None:
    for owner, tokens in (("a", "ab"), ("b", "abcd")):
        blocks.allocate(owner, demand(tokens))
    blocks.commit("a", hashes_of("ab"))
    blocks.commit("b", hashes_of("abcd"))
    blocks.free("a")
    blocks.free("b")
    blocks.allocate("x", demand("....", num_blocks=5))
    assert len(blocks.match(hashes_of("abcd"))) == 1


def test_growing_covers_the_tokens_or_changes_nothing(blocks: BlockManager) -> None:
    blocks.allocate("a", demand("ab"))
    assert blocks.grow("a", 2)
    assert len(blocks.table("a")) == 1
    assert blocks.grow("a", 3)
    assert len(blocks.table("a")) == 2
    assert not blocks.grow("a", 13)
    assert len(blocks.table("a")) == 2


def test_without_a_prefix_cache_nothing_is_matched() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, prefix_cache=False)
    Computed(blocks)("abcd", "a")
    blocks.free("a")
    assert blocks.allocate("b", demand("abcd")) == 0
    assert blocks.num_cached == 0
    blocks.check_invariants()


def test_generations_grow_for_a_new_owner_and_stay_for_the_same_content() -> None:
    generations = np.zeros(3, np.uint64)
    blocks = BlockManager(3, BLOCK_SIZE, generations=generations)
    compute = Computed(blocks)
    first = blocks.generations(compute("abX", "a"))
    assert first == (1, 1)
    block = blocks.table("a")[0]
    blocks.free("a")
    assert generations[block] == 1
    compute("abY", "b")  # the same content, matched again
    assert blocks.table("b")[0] == block
    assert generations[block] == 1
    blocks.free("b")
    compute("pqrstu", "c")  # evicts it
    assert generations[block] == 2


def test_the_generation_grows_before_the_block_is_handed_out() -> None:
    """Whoever gets a block finds its generation grown already: nothing can be written before."""
    order: list[tuple[int, bool]] = []

    class Recorded(list[int]):
        def __setitem__(self, block: object, value: object) -> None:
            super().__setitem__(block, value)  # type: ignore[call-overload] # list's overloads, passed through
            order.append((int(str(block)), "a" in manager.owners))

    manager = BlockManager(3, BLOCK_SIZE, generations=Recorded([0, 0, 0]))
    manager.allocate("a", demand("abcd"))
    assert order == [(block, False) for block in manager.table("a")]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 2), (2, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(num_blocks, block_size)


def test_every_block_has_a_generation() -> None:
    with pytest.raises(ValueError, match="num_blocks = 4"):
        BlockManager(4, 2, generations=[0, 0])


@pytest.mark.parametrize("damage", ["lose", "double", "count", "hash"])
def test_the_invariants_name_what_is_wrong(damage: str) -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    Computed(blocks)("abc", "a")
    first = blocks.table("a")[0]
    if damage == "lose":
        blocks._free.popleft()
    elif damage == "double":
        blocks._free.append(first)
    elif damage == "count":
        blocks._num_refs[first] += 1
    else:
        del blocks._hash_of[first]
    with pytest.raises(AssertionError, match=r"blocks|hash"):
        blocks.check_invariants()
