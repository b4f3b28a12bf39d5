"""Pins that expire: a prefill pod's leases on blocks it handed off, a decode pod's credits for blocks it promised.

Pure: `now` is an argument, in seconds of any monotonic clock. The table knows names only; whoever grants a lease
frees its blocks when `release` says True or `expire` lists it: exactly once.
"""

from __future__ import annotations

import math


class LeaseTable:
    """At its end a lease is over: it cannot be renewed any more, but stays listed until `expire` reports it."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def grant(self, lease_id: str, now: float, duration_s: float) -> None:
        """Raises ValueError for a lease that exists already or a duration that is not positive and finite."""
        if lease_id in self._ends:
            raise ValueError(f"lease_id = {lease_id!r}: already granted")
        self._ends[lease_id] = now + checked_duration(duration_s)

    def renew(self, lease_id: str, now: float, duration_s: float) -> bool:
        """Lets it last at least `duration_s` from now; never shortens it. False when unknown or over."""
        checked_duration(duration_s)
        end = self._ends.get(lease_id)
        if end is None or end <= now:
            return False
        self._ends[lease_id] = max(end, now + duration_s)
        return True

    def release(self, lease_id: str) -> bool:
        """Ends the lease; False when unknown, so that a second release frees nothing."""
        return self._ends.pop(lease_id, None) is not None

    def expire(self, now: float) -> list[str]:
        """Removes every lease that is over and returns their ids, the longest overdue first."""
        over = sorted((end, lease_id) for lease_id, end in self._ends.items() if end <= now)
        for _, lease_id in over:
            del self._ends[lease_id]
        return [lease_id for _, lease_id in over]

    def remaining_s(self, lease_id: str, now: float) -> float:
        """Seconds left, 0 when over. Raises KeyError when unknown."""
        return max(0.0, self._ends[lease_id] - now)

    def __len__(self) -> int:
        return len(self._ends)


def checked_duration(duration_s: float) -> float:
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s = {duration_s}: must be positive and finite")
    return duration_s
