"""Who owns which block of the KV cache.

Every block is in exactly one place:

    free        no content worth keeping
    cached      hashed content that no sequence uses, in order of last use: matched again, or evicted
    referenced  in the block tables of one or more sequences

    free ──allocate──► referenced ──free()──► cached (if hashed), else free
    cached ──match──► referenced              same content: the generation stays
    cached ──evict──► referenced              new content: the generation grows first

**Writing.** A block that is shared or hashed is never written: `make_writable` gives the writer a copy. A block gets
its hash in `commit`, which is called only after its KV was really computed or received, so a match is always valid.

**Duplicates.** Two sequences may compute the same block at the same time. The first to commit names the block; at the
second commit that table takes over the named block and gives its own back. So a table's committed blocks are always
the named ones, and a child in the cache never outlives its parent: `free` returns a table's blocks last to first,
so children are less recently used than their parents and are evicted before them.

**Generations.** `generations[b]` lives in memory that other pods read. It grows before block b is handed to a new
owner, hence before the first byte of new content is written. A reader copies the block first and reads its generation
afterwards: if any byte that it copied belonged to a new owner, the increment had happened before that write, so the
generation it reads differs from the one in its hand-off. Blocks that were released, cached and matched again kept
their content, so an unchanged generation is right for them too. (The argument needs stores to become visible in
program order, which x86 gives; a pod on a weaker architecture needs a barrier in `_take`.)

Prefix caching by block hash and its LRU order follow vLLM (https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import KeysView
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.batch import BlockCopy


class Generations(Protocol):
    """A list of int or a one-dimensional numpy array of integers; one a block."""

    def __len__(self) -> int: ...
    def __getitem__(self, block: int, /) -> int: ...
    def __setitem__(self, block: int, value: int, /) -> None: ...


@dataclass(slots=True)
class _Table:
    """Blocks of one sequence in token order; the first `num_committed` are named in the prefix cache.

    A change of the table replaces `blocks`: whoever has the tuple of an earlier step sees at a glance that it is new.
    """

    blocks: tuple[int, ...] = ()
    num_committed: int = 0

    def put(self, index: int, block: int) -> None:
        self.blocks = (*self.blocks[:index], block, *self.blocks[index + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a sequence needs to get a block table.

    `hashes` are those of its full blocks. Of the tokens found cached at most `max_cached_tokens` are used, because the
    owner will write from there on: when that lies inside a cached block, one more block must be free for
    `make_writable` to copy it to. `keep_free` blocks must stay free afterwards.
    """

    hashes: Seq[bytes]
    num_blocks: int
    max_cached_tokens: int
    keep_free: int = 0


class BlockManager:
    """Owns all blocks and block tables; pure. Sizes are in blocks unless a name says tokens."""

    def __init__(
        self, num_blocks: int, block_size: int, *, generations: Generations | None = None, prefix_cache: bool = True
    ) -> None:
        """Raises ValueError when a size is below 1 or `generations` is shorter than `num_blocks`."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks = {num_blocks}, block_size = {block_size}: both must be at least 1")
        if generations is not None and len(generations) < num_blocks:
            raise ValueError(f"generations has {len(generations)} entries: must have num_blocks = {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._generations: Generations = [0] * num_blocks if generations is None else generations
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._tables: dict[str, _Table] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: free or evictable."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that hold hashed content nobody uses at the moment."""
        return len(self._cached)

    @property
    def owners(self) -> KeysView[str]:
        """Ids of all sequences that own a block table."""
        return self._tables.keys()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, sequence_id: str) -> tuple[int, ...]:
        """Blocks in token order, the same object as long as they are the same. KeyError: it owns none."""
        return self._tables[sequence_id].blocks

    def generations(self, sequence_id: str) -> tuple[int, ...]:
        """Of `table(sequence_id)`'s blocks."""
        return tuple(int(self._generations[block]) for block in self._tables[sequence_id].blocks)

    def match(self, hashes: Seq[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of `hashes`. Takes no reference."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(self, demand: Demand) -> bool:
        return self._plan(demand) is not None

    def allocate(self, sequence_id: str, demand: Demand) -> int | None:
        """Gives `sequence_id` a table; returns how many tokens at its start are cached.

        None, and nothing changed, when too few blocks are free. ValueError: it has a table already.
        """
        if sequence_id in self._tables:
            raise ValueError(f"sequence_id = {sequence_id!r}: has a block table already")
        matched = self._plan(demand)
        if matched is None:
            return None
        for block in matched:
            self._reference(block)
        fresh = [self._take() for _ in range(demand.num_blocks - len(matched))]
        self._tables[sequence_id] = _Table((*matched, *fresh), len(matched))
        return min(len(matched) * self.block_size, demand.max_cached_tokens)

    def grow(self, sequence_id: str, num_tokens: int) -> bool:
        """Extends the table to cover `num_tokens`. False, and nothing changed, when too few blocks are free."""
        table = self._tables[sequence_id]
        num_missing = self.blocks_for(num_tokens) - len(table.blocks)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free:
            return False
        table.blocks += tuple(self._take() for _ in range(num_missing))
        return True

    def shrink(self, sequence_id: str, num_blocks: int) -> None:
        """Gives back the blocks past the first `num_blocks`; nothing worth keeping was written there."""
        table = self._tables[sequence_id]
        table.blocks, surplus = table.blocks[:num_blocks], table.blocks[num_blocks:]
        for block in reversed(surplus):
            self._release(block)

    def make_writable(self, sequence_id: str, start: int, end: int) -> list[BlockCopy]:
        """Replaces blocks under tokens start .. end - 1 that are shared or hashed; the runner must copy them first.

        A source may be evicted again at once, even by a later copy of the same batch: copies run in order and before
        anything is computed, so each still reads what it should.
        """
        table = self._tables[sequence_id]
        copies: list[BlockCopy] = []
        for index in range(start // self.block_size, self.blocks_for(end)):
            source = table.blocks[index]
            if self._num_refs[source] == 1 and source not in self._hash_of:
                continue
            target = self._take()
            table.put(index, target)
            table.num_committed = min(table.num_committed, index)
            self._release(source)
            copies.append(BlockCopy(source, target))
        return copies

    def can_commit(self, sequence_id: str, num_tokens: int) -> bool:
        """Whether there is anything to name once the KV of the first `num_tokens` tokens is complete."""
        return self.prefix_cache and num_tokens // self.block_size > self._tables[sequence_id].num_committed

    def commit(self, sequence_id: str, hashes: Seq[bytes]) -> None:
        """Names the leading blocks, whose KV is now complete, by `hashes`: from here on they can be matched."""
        if not self.prefix_cache:
            return
        table = self._tables[sequence_id]
        for index in range(table.num_committed, len(hashes)):
            block, block_hash = table.blocks[index], hashes[index]
            named = self._block_of.setdefault(block_hash, block)
            if named == block:
                self._hash_of[block] = block_hash
            else:
                table.put(index, named)
                self._reference(named)
                self._release(block)
        table.num_committed = max(table.num_committed, len(hashes))

    def free(self, sequence_id: str) -> None:
        """Gives up the table. KeyError: it owns none."""
        for block in reversed(self._tables.pop(sequence_id).blocks):
            self._release(block)

    def _plan(self, demand: Demand) -> list[int] | None:
        """The blocks to share; None when the others would take too many."""
        matched = self.match(demand.hashes[: demand.num_blocks])
        if len(matched) * self.block_size > demand.max_cached_tokens:
            if self._fits(matched, demand, num_copies=1):
                return matched
            matched = matched[: demand.max_cached_tokens // self.block_size]  # no room for the copy: compute it again
        return matched if self._fits(matched, demand) else None

    def _fits(self, matched: list[int], demand: Demand, num_copies: int = 0) -> bool:
        num_in_use = sum(1 for block in matched if self._num_refs[block])
        return demand.num_blocks - num_in_use + num_copies + demand.keep_free <= self.num_free

    def _take(self) -> int:
        """A block for a new owner, its generation already grown."""
        block = self._free.popleft() if self._free else self._evict()
        self._generations[block] += 1
        self._num_refs[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _reference(self, block: int) -> None:
        self._num_refs[block] += 1
        self._cached.pop(block, None)

    def _release(self, block: int) -> None:
        self._num_refs[block] -= 1
        if self._num_refs[block]:
            return
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def check_invariants(self) -> None:
        """AssertionError naming the blocks that are in no place, in two places, or counted wrongly."""
        refs = Counter(block for table in self._tables.values() for block in table.blocks)
        places = Counter([*self._free, *self._cached, *refs.keys()])
        wrong = [block for block in range(self.num_blocks) if places[block] != 1]
        assert not wrong, f"blocks {wrong} are not exactly one of free, cached, referenced"
        assert len(places) == self.num_blocks, f"unknown blocks: {sorted(places)[self.num_blocks :]}"
        miscounted = [block for block in range(self.num_blocks) if self._num_refs[block] != refs[block]]
        assert not miscounted, f"blocks {miscounted}: reference counts differ from the block tables"
        assert self._hash_of == {block: h for h, block in self._block_of.items()}, "hashes and blocks do not correspond"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached block has no hash"
        assert not self._hash_of.keys() & set(self._free), "a free block has a hash"
        for sequence_id, table in self._tables.items():
            unnamed = [block for block in table.blocks[: table.num_committed] if block not in self._hash_of]
            assert not unnamed, f"sequence {sequence_id}: committed blocks {unnamed} have no hash"
