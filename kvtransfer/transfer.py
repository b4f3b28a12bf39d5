"""One pull as a state machine, and what it reads. Pure: `puller.py` does what the states ask for.

    CONNECTING ── CONNECTED ──> WAITING ── ADMITTED ──> READING ── ALL_LANDED ──> VERIFYING ── VERIFIED ──> DONE
       │  └─ NOTHING_TO_READ ──────────────────────────────────────────────────────────────────────────────> DONE
       └───── FAILED (also from WAITING) ──> LOST           FAILED ──> SETTLING ── ALL_SETTLED ──> LOST

A destination block is quarantined from the first posted read until the last one has settled: while any read is in
flight its bytes may land, whatever became of the request. Only DONE and LOST give the blocks back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.layout import KVLayout
from proto import kv_pb2
from proto.errors import InternalError, LayoutMismatch


class State(enum.Enum):
    CONNECTING = "owns nothing"
    WAITING = "in line for a slot: owns nothing yet, so that a sick source holds up no other transfer"
    READING = "owns a slot, the reads in flight and the destination blocks"
    VERIFYING = "likewise; all KV has landed and the generation numbers are being read"
    SETTLING = "likewise; it has failed, and its reads in flight are being stopped"
    DONE = "owns nothing; the blocks hold the KV"
    LOST = "owns nothing; the blocks hold anything"


class Event(enum.Enum):
    NOTHING_TO_READ = enum.auto()
    CONNECTED = enum.auto()
    ADMITTED = enum.auto()
    ALL_LANDED = enum.auto()
    VERIFIED = enum.auto()
    FAILED = enum.auto()
    ALL_SETTLED = enum.auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CONNECTING, Event.NOTHING_TO_READ): State.DONE,
    (State.CONNECTING, Event.CONNECTED): State.WAITING,
    (State.CONNECTING, Event.FAILED): State.LOST,
    (State.WAITING, Event.ADMITTED): State.READING,
    (State.WAITING, Event.FAILED): State.LOST,
    (State.READING, Event.ALL_LANDED): State.VERIFYING,
    (State.READING, Event.FAILED): State.SETTLING,
    (State.VERIFYING, Event.VERIFIED): State.DONE,
    (State.VERIFYING, Event.FAILED): State.SETTLING,
    (State.SETTLING, Event.FAILED): State.SETTLING,  # one cause is enough: a cancellation may come on top
    (State.SETTLING, Event.ALL_SETTLED): State.LOST,
}
QUARANTINED = frozenset({State.READING, State.VERIFYING, State.SETTLING})
FINAL = frozenset({State.DONE, State.LOST})


@dataclass(slots=True, eq=False)
class Transfer:
    """Mutable; owned by one puller. Events that have no place in the table are bugs: RuntimeError."""

    sequence_id: str
    local_block_ids: frozenset[int]
    state: State = State.CONNECTING
    num_in_flight: int = 0

    def on(self, event: Event) -> None:
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise RuntimeError(f"transfer of {self.sequence_id!r}: {event.name} has no place in {self.state.name}")
        if self.num_in_flight and event is not Event.FAILED:
            raise RuntimeError(
                f"transfer of {self.sequence_id!r}: {event.name} with {self.num_in_flight} reads in flight"
            )
        self.state = target

    def read_posted(self) -> None:
        if self.state not in (State.READING, State.VERIFYING):
            raise RuntimeError(f"transfer of {self.sequence_id!r}: a read was posted in {self.state.name}")
        self.num_in_flight += 1

    def read_settled(self) -> None:
        """Its bytes have landed, or never will."""
        if self.num_in_flight < 1:
            raise RuntimeError(f"transfer of {self.sequence_id!r}: a read settled that was not posted")
        self.num_in_flight -= 1

    def fail(self) -> None:
        """Ends the transfer at once, or when called again after the last read has settled. No effect on a final one."""
        if self.state not in FINAL:
            self.on(Event.FAILED)
        if self.state is State.SETTLING and not self.num_in_flight:
            self.on(Event.ALL_SETTLED)

    @property
    def quarantined(self) -> frozenset[int]:
        return self.local_block_ids if self.state in QUARANTINED else frozenset()

    def check_invariants(self) -> None:
        assert self.num_in_flight == 0 or self.state in QUARANTINED, (
            f"transfer of {self.sequence_id!r}: {self.num_in_flight} reads in flight in {self.state.name}"
        )


@dataclass(frozen=True, slots=True)
class GroupRead:
    """Bytes [offset, offset + num_bytes) of each source block go to the same place in its local block."""

    source_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`groups` are read with one transfer each; `expected` are the generations of all source blocks read."""

    groups: tuple[GroupRead, ...] = ()
    expected: dict[int, int] = field(default_factory=dict)

    @property
    def local_block_ids(self) -> frozenset[int]:
        return frozenset(block for group in self.groups for block in group.local_block_ids)

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes * len(group.local_block_ids) for group in self.groups)


def plan_pull(
    layout: KVLayout, handoff: kv_pb2.KVHandoff, local_block_ids: Sequence[int], num_cached_tokens: int
) -> PullPlan:
    """What to read when the first `num_cached_tokens` tokens are here already: the blocks from the first incomplete
    one on, hand-off block i into local block i. Raises LayoutMismatch, and InternalError for what does not add up."""
    if num_cached_tokens < 0 or handoff.num_tokens < 1:
        raise InternalError(
            f"num_cached_tokens = {num_cached_tokens}, num_tokens = {handoff.num_tokens}: must be at least 0 and 1"
        )
    if num_cached_tokens >= handoff.num_tokens:
        return PullPlan()
    first = num_cached_tokens // layout.block_size
    last = -(-handoff.num_tokens // layout.block_size)
    check_groups(layout, handoff, last)
    local = tuple(local_block_ids[first:last])
    if len(local) != last - first or len(set(local)) != len(local):
        raise InternalError(f"local_block_ids = {list(local_block_ids)}: must be {last} different blocks at least")
    layer_bytes = layout.block_bytes // layout.num_layers
    groups = tuple(
        GroupRead(
            source_block_ids=tuple(ref.block_id for ref in group.blocks[first:last]),
            local_block_ids=local,
            offset=group.first_layer * layer_bytes,
            num_bytes=group.num_layers * layer_bytes,
        )
        for group in handoff.groups
    )
    return PullPlan(groups, generations_of(handoff, first, last))


def check_groups(layout: KVLayout, handoff: kv_pb2.KVHandoff, num_blocks: int) -> None:
    """Groups must follow one another and cover all layers, each with enough blocks."""
    next_layer = 0
    for group in handoff.groups:
        if group.first_layer != next_layer or group.num_layers < 1:
            raise LayoutMismatch(
                f"hand-off layers {group.first_layer} + {group.num_layers}: expected from {next_layer} on"
            )
        if len(group.blocks) < num_blocks:
            raise InternalError(
                f"{len(group.blocks)} blocks for {handoff.num_tokens} tokens: must be {num_blocks} at least"
            )
        next_layer += group.num_layers
    if next_layer != layout.num_layers:
        raise LayoutMismatch(f"num_layers {layout.num_layers} != {next_layer} in the hand-off")


def generations_of(handoff: kv_pb2.KVHandoff, first: int, last: int) -> dict[int, int]:
    """By source block. Raises InternalError when a hand-off contradicts itself."""
    expected: dict[int, int] = {}
    for group in handoff.groups:
        for ref in group.blocks[first:last]:
            if expected.setdefault(ref.block_id, ref.generation) != ref.generation:
                raise InternalError(f"block {ref.block_id}: the hand-off names two generations")
    return expected
