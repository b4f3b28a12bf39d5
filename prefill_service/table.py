"""Every sequence a prefill pod owes something to: an answer while it computes, its blocks while they are leased.

Pure. The lease's id is the sequence's id, so whoever cancelled a Prefill whose answer was already under way can still
release what it never heard of.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.batch import TokenEvent
from kvtransfer.lease import LeaseTable
from proto.errors import InvalidRequest


@dataclass(slots=True, eq=False)
class Entry:
    sequence_id: str
    first_token: asyncio.Future[TokenEvent]
    lease_s: float
    leased: bool = False  # the blocks are pinned and the hand-off was given out


class PrefillTable:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._leases = LeaseTable()
        self.idle = asyncio.Event()  # set while the table is empty
        self.idle.set()

    def add(self, sequence_id: str, first_token: asyncio.Future[TokenEvent], lease_s: float) -> Entry:
        """Raises InvalidRequest when the sequence is here already."""
        if sequence_id in self._entries:
            field = "sequence.sequence_id"
            raise InvalidRequest(f"{field} = {sequence_id!r}: is here already, must be new", field=field)
        entry = self._entries[sequence_id] = Entry(sequence_id, first_token, lease_s)
        self.idle.clear()
        return entry

    def get(self, sequence_id: str) -> Entry | None:
        return self._entries.get(sequence_id)

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.sequence_id]
        if entry.leased:
            self._leases.release(entry.sequence_id)
        if not self._entries:
            self.idle.set()

    def lease(self, entry: Entry, now: float) -> None:
        self._leases.grant(entry.sequence_id, now, entry.lease_s)
        entry.leased = True

    def renew(self, lease_id: str, now: float) -> bool:
        entry = self._entries.get(lease_id)
        return entry is not None and entry.leased and self._leases.renew(lease_id, now, entry.lease_s)

    def lease_remaining_s(self, entry: Entry, now: float) -> float:
        return self._leases.remaining_s(entry.sequence_id, now)

    def take_expired(self, now: float) -> list[Entry]:
        """Entries whose lease nobody renewed; they are out of the table."""
        expired = [self._entries[sequence_id] for sequence_id in self._leases.expire(now)]
        for entry in expired:
            entry.leased = False
            self.remove(entry)
        return expired

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check_invariants(self) -> None:
        leased = sum(entry.leased for entry in self._entries.values())
        assert leased == len(self._leases), f"{leased} leased sequences, {len(self._leases)} leases"
        assert self.idle.is_set() == (not self._entries), f"idle is {self.idle.is_set()} with {len(self._entries)}"
