"""The block manager under any order of calls, against a model that knows what every slot holds.

A sequence's tokens are characters; the model writes into slot (block, offset) the whole text up to that token, as its
KV depends on all of it, and a serial number, as KV computed twice may differ in its last bits. Then "the cached tokens
are right" and "an equal generation means equal content" are plain comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from engine.block_hash import extend_hashes
from engine.block_manager import BlockManager, Demand
from tests.engine.machines import (
    allocate_and_name_at_once,
    explore,
    find_planted,
    take_without_growing_the_generation,
)

BLOCK_SIZE = 2
NUM_BLOCKS = 7
TEXTS = st.sampled_from(["a", "ab", "aba", "abab", "ababb", "ababab", "abba", "abbaabba", "aa", "aabbaa"])


Slot = tuple[str, int]  # text up to the token, number of the write
UNWRITTEN: Slot = ("", 0)


@dataclass
class Writer:
    """A sequence in the model."""

    name: str
    text: str
    num_written: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What a remote reader was promised: a block, its generation and the content of its written slots."""

    block: int
    generation: int
    content: tuple[Slot, ...]


def hashes_of(text: str) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, b"", [ord(t) for t in text], block_size=BLOCK_SIZE, num_blocks=len(text) // BLOCK_SIZE)
    return hashes


class BlockManagerMachine(RuleBasedStateMachine):
    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        self.num_names = 0
        self.live: dict[str, Writer] = {}
        self.texts: set[str] = set()  # all that were ever named
        self.snapshots: list[Snapshot] = []

    @initialize()
    def start(self) -> None:
        self.generations = [0] * NUM_BLOCKS
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, generations=self.generations)
        self.content: list[list[Slot]] = [[UNWRITTEN] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.num_writes = 0

    @rule(target=writers, text=TEXTS, keep_free=st.integers(0, 2), computes=st.booleans())
    def allocate(self, text: str, keep_free: int, computes: bool) -> Writer:
        writer = Writer(f"w{self.num_names}", text)
        self.num_names += 1
        demand = Demand(
            hashes=hashes_of(text),
            num_blocks=self.blocks.blocks_for(len(text)),
            max_cached_tokens=len(text) - 1 if computes else len(text),
            keep_free=keep_free,
        )
        num_free = self.blocks.num_free
        can = self.blocks.can_allocate(demand)
        num_cached = self.blocks.allocate(writer.name, demand)
        assert can is (num_cached is not None)
        if num_cached is None:
            assert self.blocks.num_free == num_free
            return writer
        assert self.blocks.num_free >= keep_free
        writer.num_written = num_cached
        self.live[writer.name] = writer
        if num_cached % BLOCK_SIZE:
            self._write(writer, len(text))  # its copy has room now, as the scheduler uses it
        return writer

    @rule(writer=writers, count=st.integers(1, 4))
    def write(self, writer: Writer, count: int) -> None:
        if writer.name in self.live and writer.num_written < len(writer.text):
            self._write(writer, min(len(writer.text), writer.num_written + count))

    def _write(self, writer: Writer, end: int) -> None:
        for copy in self.blocks.make_writable(writer.name, writer.num_written, end):
            self.content[copy.target] = list(self.content[copy.source])
        table = self.blocks.table(writer.name)
        self.num_writes += 1
        for position in range(writer.num_written, end):
            block = table[position // BLOCK_SIZE]
            others = [name for name in self.blocks.owners - {writer.name} if block in self.blocks.table(name)]
            assert not others, f"{writer.name} writes block {block}, which {others} share"
            self.content[block][position % BLOCK_SIZE] = (
                writer.text[: position + 1],
                self.num_writes,
            )
        writer.num_written = end

    @rule(writer=writers)
    def commit(self, writer: Writer) -> None:
        if writer.name in self.live:
            written = writer.text[: writer.num_written]
            self.blocks.commit(writer.name, hashes_of(written))
            self.texts.add(written)

    @rule(writer=writers, more=st.text("ab", min_size=1, max_size=3))
    def grow(self, writer: Writer, more: str) -> None:
        if writer.name in self.live and self.blocks.grow(writer.name, len(writer.text) + len(more)):
            writer.text += more

    @rule(writer=consumes(writers))
    def free(self, writer: Writer) -> None:
        if self.live.pop(writer.name, None):
            self.blocks.free(writer.name)

    @rule(writer=writers)
    def promise(self, writer: Writer) -> None:
        """Hands the written part of each block to a reader, who will look again at any later time."""
        if writer.name not in self.live:
            return
        for index, block in enumerate(self.blocks.table(writer.name)):
            num_slots = min(BLOCK_SIZE, max(0, writer.num_written - index * BLOCK_SIZE))
            self.snapshots.append(Snapshot(block, self.generations[block], tuple(self.content[block][:num_slots])))

    @invariant()
    def everything_is_counted_once(self) -> None:
        self.blocks.check_invariants()
        assert self.blocks.owners == self.live.keys()

    @invariant()
    def every_sequence_finds_its_own_content(self) -> None:
        for writer in self.live.values():
            table = self.blocks.table(writer.name)
            for position in range(writer.num_written):
                found, _ = self.content[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                assert found == writer.text[: position + 1], f"{writer.name}: token {position} is {found!r}"

    @invariant()
    def an_equal_generation_means_equal_content(self) -> None:
        for seen in self.snapshots:
            if self.generations[seen.block] == seen.generation:
                now = tuple(self.content[seen.block][: len(seen.content)])
                assert now == seen.content, f"block {seen.block} changed under generation {seen.generation}"

    @invariant()
    def every_named_block_can_be_reached_from_its_root(self) -> None:
        reachable = {block for text in self.texts for block in self.blocks.match(hashes_of(text))}
        assert reachable == set(self.blocks._hash_of), "a child outlived its parent"

    def teardown(self) -> None:
        for name in list(self.live):
            self.blocks.free(name)
        self.blocks.check_invariants()
        assert self.blocks.num_free == NUM_BLOCKS


def test_any_order_of_calls() -> None:
    explore(BlockManagerMachine, 100)


def never_copy(self: BlockManager, sequence_id: str, start: int, end: int) -> list[object]:
    return []


def free_first_to_last(self: BlockManager, sequence_id: str) -> None:
    for block in self._tables.pop(sequence_id).blocks:
        self._release(block)


@pytest.mark.parametrize(
    ("method", "planted", "complaint"),
    [
        ("_take", take_without_growing_the_generation, "changed under generation"),
        ("make_writable", never_copy, "share|changed under"),
        ("allocate", allocate_and_name_at_once, "token|reach|outlived"),
        ("free", free_first_to_last, "outlived its parent"),
    ],
)
def test_a_planted_bug_is_noticed(
    monkeypatch: pytest.MonkeyPatch, method: str, planted: object, complaint: str
) -> None:
    monkeypatch.setattr(BlockManager, method, planted)
    with pytest.raises(AssertionError, match=complaint):
        find_planted(BlockManagerMachine)
