"""Which prompt prefixes this router has sent to which pod, to send the next one that shares them there. Pure.

Prefixes are counted in chunks of 16 tokens whatever the pods' block sizes; a chunk's hash covers all tokens before it
and the cache salt. The index is a guess: pods evict without telling, so a decision never depends on a hit for
correctness. It forgets least recently used prefixes first, and everything of a pod whose epoch has changed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

CHUNK_TOKENS = 16
MAX_ENTRIES = 200_000  # about 30 MB


def chunk_hashes(token_ids: Sequence[int], cache_salt: str) -> tuple[bytes, ...]:
    """One 16-byte hash for each whole chunk of `token_ids`, each covering all tokens up to its end."""
    hashes = []
    parent = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
    for end in range(CHUNK_TOKENS, len(token_ids) + 1, CHUNK_TOKENS):
        chunk = array("i", token_ids[end - CHUNK_TOKENS : end]).tobytes()
        parent = hashlib.blake2b(parent + chunk, digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


class PrefixIndex:
    """Owned by the router's event loop; `cached_tokens` is the read-only view that the policy sees."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._epochs: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def cached_tokens(self, pod_id: str, epoch: str, hashes: Sequence[bytes]) -> int:
        """How many leading tokens the pod probably has in its prefix cache."""
        if self._epochs.get(pod_id) != epoch:
            return 0
        count = 0
        while count < len(hashes) and (pod_id, hashes[count]) in self._entries:
            count += 1
        return count * CHUNK_TOKENS

    def record(self, pod_id: str, epoch: str, hashes: Sequence[bytes]) -> None:
        """The pod has computed (or received) this prefix. Longer prefixes are forgotten before their beginnings."""
        if self._epochs.get(pod_id) != epoch:
            self._forget(pod_id)
            self._epochs[pod_id] = epoch
        for value in reversed(hashes):
            self._entries[pod_id, value] = None
            self._entries.move_to_end((pod_id, value))
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def forget(self, pod_id: str, epoch: str) -> None:
        """This incarnation of the pod is gone; a newer one's prefixes stay."""
        if self._epochs.get(pod_id) == epoch:
            self._forget(pod_id)

    def _forget(self, pod_id: str) -> None:
        if self._epochs.pop(pod_id, None) is not None:
            for key in [key for key in self._entries if key[0] == pod_id]:
                del self._entries[key]

    def check_invariants(self) -> None:
        assert len(self._entries) <= self._max_entries, f"{len(self._entries)} entries > {self._max_entries}"
        unknown = {pod_id for pod_id, _ in self._entries} - self._epochs.keys()
        assert not unknown, f"prefixes of pods without an epoch: {unknown}"
