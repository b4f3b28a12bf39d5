"""Every sequence a decode pod owes something to, from the wait for blocks to its last token. One owner, one table.

    WAITING ──> RESERVED ──> TRANSFERRING ──> DECODING      with a hand-off: a credit, the transfer, then tokens
       ·            ·              └──> SETTLING            aborted: the blocks are quarantined until no byte can land
    (new) ─────────────────────────────────> DECODING       decode-only

Any state may end by leaving the table; TRANSFERRING only through DECODING, SETTLING or its transfer's own failure.
A credit's id is its sequence's id. Pure.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from dataclasses import dataclass
from typing import Any

from decode_service.stream import TokenStream
from engine.batch import EngineLoad, Reservation
from kvtransfer.lease import LeaseTable
from proto.errors import InvalidRequest


class State(enum.Enum):
    WAITING = "waiting"  # for blocks; owns none
    RESERVED = "reserved"  # a credit
    TRANSFERRING = "transferring"
    SETTLING = "settling"
    DECODING = "decoding"  # the engine has it


NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RESERVED}),
    State.RESERVED: frozenset({State.TRANSFERRING}),
    State.TRANSFERRING: frozenset({State.SETTLING, State.DECODING}),
    State.SETTLING: frozenset(),
    State.DECODING: frozenset(),
}


@dataclass(slots=True, eq=False)
class Entry:
    sequence_id: str
    stream: TokenStream  # where its tokens go; whatever state it is in, the stream's end is its end
    state: State
    reservation: Reservation | None = None  # from RESERVED on
    task: asyncio.Task[Any] | None = None  # waits for blocks (WAITING) or pulls them (TRANSFERRING, SETTLING)
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    first_sent: bool = False  # its first message carried timings and cached tokens

    def advance(self, state: State) -> None:
        assert state in NEXT[self.state], f"sequence {self.sequence_id}: {self.state.value} -> {state.value}"
        self.state = state


class DecodeTable:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._credits = LeaseTable()
        self.idle = asyncio.Event()  # set while the table is empty
        self.idle.set()

    def add(self, entry: Entry) -> Entry:
        """Raises InvalidRequest when the sequence is here already."""
        if entry.sequence_id in self._entries:
            field = "sequence.sequence_id"
            raise InvalidRequest(f"{field} = {entry.sequence_id!r}: is here already, must be new", field=field)
        self._entries[entry.sequence_id] = entry
        self.idle.clear()
        return entry

    def get(self, sequence_id: str) -> Entry | None:
        return self._entries.get(sequence_id)

    def holds(self, entry: Entry) -> bool:
        return self._entries.get(entry.sequence_id) is entry

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.sequence_id]
        self._credits.release(entry.sequence_id)
        if not self._entries:
            self.idle.set()

    def grant(self, entry: Entry, reservation: Reservation, now: float, duration_s: float) -> None:
        entry.reservation = reservation
        entry.advance(State.RESERVED)
        self._credits.grant(entry.sequence_id, now, duration_s)

    def claim(self, credit_id: str) -> Entry | None:
        """Turns a live credit into a transfer; None when it expired, was released or never was."""
        entry = self._entries.get(credit_id)
        if entry is None or not self._credits.release(credit_id):
            return None
        entry.advance(State.TRANSFERRING)
        return entry

    def take_expired(self, now: float) -> list[Entry]:
        """Entries whose credit nobody used; they are out of the table."""
        expired = [self._entries[sequence_id] for sequence_id in self._credits.expire(now)]
        for entry in expired:
            self.remove(entry)
        return expired

    def of_stream(self, stream: TokenStream) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.stream is stream]

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def num_credits(self) -> int:
        return len(self._credits)

    def check_invariants(self, load: EngineLoad) -> None:
        """Raises AssertionError naming what disagrees with itself or with the engine's `load`."""
        count = Counter(entry.state for entry in self._entries.values())
        assert count[State.RESERVED] == len(self._credits), f"{count} but {len(self._credits)} credits"
        reserved = count[State.RESERVED] + count[State.TRANSFERRING] + count[State.SETTLING]
        assert load.num_reserved == reserved, f"the engine has {load.num_reserved} reservations, the table {reserved}"
        computing = load.num_waiting + load.num_running
        assert computing == count[State.DECODING], f"the engine computes {computing}, the table has {count}"
        assert self.idle.is_set() == (not self._entries), f"idle is {self.idle.is_set()} with {len(self._entries)}"
        for entry in self._entries.values():
            _check_entry(entry)


def _check_entry(entry: Entry) -> None:
    name = f"sequence {entry.sequence_id} ({entry.state.value})"
    if entry.state in {State.TRANSFERRING, State.SETTLING}:
        assert entry.reservation is not None, f"{name} has no blocks to land in"
        assert entry.task is not None, f"{name} has no transfer"
        assert not entry.task.done(), f"{name} has no transfer any more"
    if entry.state is not State.SETTLING:
        assert not entry.stream.ended, f"{name} belongs to a stream that has ended"
