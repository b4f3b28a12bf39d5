from __future__ import annotations

from engine.block_hash import block_hash, extend_hashes, root_hash


def hashes_of(tokens: list[int], block_size: int = 2, root: bytes = b"root") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root, tokens, block_size=block_size, num_blocks=len(tokens) // block_size)
    return hashes


def test_equal_prefixes_share_hashes_and_nothing_after_a_difference_does() -> None:
    one, other = hashes_of([1, 2, 3, 4, 5, 6]), hashes_of([1, 2, 3, 9, 5, 6])
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_the_same_block_at_another_place_is_another_block() -> None:
    first, second = hashes_of([1, 2, 1, 2])
    assert first != second


def test_roots_keep_models_salts_and_their_boundaries_apart() -> None:
    roots = [root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc"), root_hash("ab", ""), root_hash("", "ab")]
    assert len(set(roots)) == len(roots)
    assert root_hash("ab", "c") == roots[0]


def test_extending_step_by_step_equals_hashing_at_once_and_keeps_what_is_known() -> None:
    tokens = list(range(100, 107))
    grown: list[bytes] = []
    for num_blocks in range(4):
        extend_hashes(grown, b"root", tokens, block_size=2, num_blocks=num_blocks)
        assert grown == hashes_of(tokens)[:num_blocks]


def test_tokens_cannot_be_mistaken_for_others_by_their_bytes() -> None:
    assert block_hash(b"p", [1, 0]) != block_hash(b"p", [0, 1])
    assert block_hash(b"p", [256]) != block_hash(b"p", [1])
    assert block_hash(b"p", [1]) != block_hash(b"p", [1, 0])
