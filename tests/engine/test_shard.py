"""Every split gives each rank something, and everything to exactly the ranks that it should."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model_config import read_config
from engine.shard import COLUMN_UNIT, Shard, check_tensor_parallel
from tests.engine.tiny_families import make_family
from tests.engine.tiny_llama import make_checkpoint


def ranks(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@given(st.integers(1, 9), st.integers(9, 3000))
def test_parts_and_columns_cover_everything_once(size: int, count: int) -> None:
    for split in (Shard.part, Shard.columns, Shard.words):
        shares = [split(shard, count) for shard in ranks(size)]
        assert list(chain(*shares)) == list(range(count))
        assert all(shares)
    if count >= COLUMN_UNIT * size:
        assert all(shard.columns(count).start % COLUMN_UNIT == 0 for shard in ranks(size))


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_heads(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_kv_heads * group), "size")
    shares = [shard.heads(num_kv_heads * group, num_kv_heads) for shard in ranks(size)]
    assert list(chain(*(share.query for share in shares))) == list(range(num_kv_heads * group))
    for share in shares:
        assert {head // group for head in share.query} == set(share.kv)  # its query heads look into its KV heads
        assert len(share.query) % len(share.kv) == 0
    if size <= num_kv_heads:
        assert Counter(chain(*(share.kv for share in shares))) == Counter(range(num_kv_heads))


def test_the_default_model_over_two_and_four_ranks() -> None:
    assert [shard.heads(9, 3).query for shard in ranks(2)] == [range(3), range(3, 9)]
    assert [shard.heads(9, 3).kv for shard in ranks(2)] == [range(1), range(1, 3)]
    assert [shard.heads(9, 3).kv for shard in ranks(4)] == [range(1), range(1, 2), range(2, 3), range(2, 3)]
    assert [shard.heads(9, 3).query for shard in ranks(4)] == [range(3), range(3, 6), range(6, 7), range(7, 9)]


@pytest.mark.parametrize(("rank", "size", "message"), [(0, 0, "size = 0"), (2, 2, "rank = 2"), (-1, 2, "rank = -1")])
def test_no_such_rank(rank: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shard(rank, size)


def test_what_a_model_cannot_be_split_into_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "llama")
    make_family(tmp_path / "experts", "qwen3-moe, not normalised", moe_intermediate_size=3)
    llama, experts = read_config(tmp_path / "llama"), read_config(tmp_path / "experts")
    check_tensor_parallel(llama, 4)
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"tensor_parallel = {size}: .* 1 to 4, its num_attention_heads"):
            check_tensor_parallel(llama, size)
    with pytest.raises(ValueError, match="tensor_parallel = 4: this model takes 1 to 3, its inner size of an expert"):
        check_tensor_parallel(experts, 4)
