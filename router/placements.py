"""What this router has in flight on each pod, so that a burst between two heartbeats does not herd. Pure.

Each placement and each removal is a signed change with its time. A pod's heartbeat shows everything that happened
before it was made, so only changes later than that correct its record.
"""

from __future__ import annotations

from collections import defaultdict, deque

from router.snapshot import Correction, PodKey

Change = tuple[float, Correction]  # when, what


class Placements:
    """Owned by the router's event loop."""

    def __init__(self) -> None:
        self._open: dict[PodKey, dict[str, Correction]] = defaultdict(dict)
        self._changes: dict[PodKey, deque[Change]] = defaultdict(deque)

    def place(self, pod: PodKey, owner: str, work: Correction, now: float) -> None:
        """Raises ValueError when `owner` has a placement on the pod already."""
        if owner in self._open[pod]:
            raise ValueError(f"{owner} is already placed on {pod}")
        self._open[pod][owner] = work
        self._changes[pod].append((now, work))

    def remove(self, pod: PodKey, owner: str, now: float) -> None:
        """Raises KeyError when nothing was placed."""
        work = self._open[pod].pop(owner)
        taken = Correction(-work.num_sequences, -work.num_tokens, -work.num_blocks)
        self._changes[pod].append((now, taken))

    def correction(self, pod: PodKey, since: float) -> Correction:
        """The sum of changes at or after `since`, the time that the pod's record shows; earlier ones are forgotten."""
        changes = self._changes.get(pod)
        if not changes:
            return Correction()
        while changes and changes[0][0] < since:
            changes.popleft()
        works = [work for _, work in changes]
        return Correction(
            sum(w.num_sequences for w in works), sum(w.num_tokens for w in works), sum(w.num_blocks for w in works)
        )

    def forget(self, live: set[PodKey]) -> None:
        """Drops the history of pods that are gone; what is still placed on them stays until its owner removes it."""
        for pod in [pod for pod in self._changes if pod not in live]:
            del self._changes[pod]
        for pod in [pod for pod, owners in self._open.items() if not owners and pod not in live]:
            del self._open[pod]

    def check_invariants(self, live_owners: set[str]) -> None:
        """Raises AssertionError naming a placement whose owner is gone."""
        owners = {owner for placed in self._open.values() for owner in placed}
        assert owners <= live_owners, f"placements without a request: {sorted(owners - live_owners)}"
