"""Pins that expire: a prefill pod's leases on blocks it handed off, a decode pod's credits for blocks it promised.

Pure: `now` is an argument, in seconds of any monotonic clock. The table knows names only; whoever grants a lease
frees the blocks of every owner that `release` or `expire` hands back, exactly once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    owner: str
    expires_at: float


class LeaseTable:
    """At `expires_at` a lease is over: it cannot be renewed any more, but stays listed until `expire` reports it."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._by_owner: dict[str, set[str]] = {}

    def grant(self, lease_id: str, owner: str, now: float, duration_s: float) -> None:
        """Raises ValueError for a lease that exists already or a duration that is not positive and finite."""
        if lease_id in self._leases:
            raise ValueError(f"lease_id = {lease_id!r}: already granted to {self._leases[lease_id].owner!r}")
        self._leases[lease_id] = Lease(owner, now + checked_duration(duration_s))
        self._by_owner.setdefault(owner, set()).add(lease_id)

    def renew(self, lease_id: str, now: float, duration_s: float) -> bool:
        """Lets it last at least `duration_s` from now; never shortens it. False when unknown or over."""
        checked_duration(duration_s)
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at <= now:
            return False
        self._leases[lease_id] = Lease(lease.owner, max(lease.expires_at, now + duration_s))
        return True

    def release(self, lease_id: str) -> str | None:
        """Ends the lease and returns its owner; None when unknown, so that a second release frees nothing."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        ids = self._by_owner[lease.owner]
        ids.discard(lease_id)
        if not ids:
            del self._by_owner[lease.owner]
        return lease.owner

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Removes every lease that is over and returns (lease id, owner), the longest overdue first."""
        over = sorted(
            (lease.expires_at, lease_id) for lease_id, lease in self._leases.items() if lease.expires_at <= now
        )
        return [(lease_id, owner) for _, lease_id in over if (owner := self.release(lease_id)) is not None]

    def owner_released(self, owner: str) -> list[str]:
        """Forgets all leases of an owner whose blocks were freed by other means; returns their ids."""
        ids = sorted(self._by_owner.get(owner, ()))
        for lease_id in ids:
            self.release(lease_id)
        return ids

    def remaining_s(self, lease_id: str, now: float) -> float:
        """Seconds left, 0 when over. Raises KeyError when unknown."""
        return max(0.0, self._leases[lease_id].expires_at - now)

    def __len__(self) -> int:
        return len(self._leases)

    def check_invariants(self) -> None:
        """Raises AssertionError: every lease belongs to exactly one owner and no owner is listed without leases."""
        listed = {lease_id: owner for owner, ids in self._by_owner.items() for lease_id in ids}
        held = {lease_id: lease.owner for lease_id, lease in self._leases.items()}
        assert listed == held, f"leases {held} and the owners' lists {listed} differ"
        assert all(self._by_owner.values()), f"an owner without leases is still listed: {self._by_owner}"
        assert sum(map(len, self._by_owner.values())) == len(held), f"a lease has two owners: {self._by_owner}"


def checked_duration(duration_s: float) -> float:
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s = {duration_s}: must be positive and finite")
    return duration_s
