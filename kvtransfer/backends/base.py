"""What a backend does for the agent: registers memory, reaches peers, moves bytes, carries notifications.

The agent checks every argument against the metadata of both sides first, so a backend gets only plans whose spans lie
inside registered regions. A backend never trusts a peer, and nothing that it does waits for ever on one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtransfer.descs import MemType

Addresses = npt.NDArray[np.uint64]  # [N]


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory: [address, address + num_bytes) of its owner. `key` tells peers how to reach it."""

    mem_type: MemType
    address: int
    num_bytes: int
    device: int
    key: str


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """One transfer: span i is lengths[i] bytes between local[i] and remote[i], both addresses of their owners."""

    read: bool  # from remote to local, else the reverse
    peer: str | None  # None: the remote side is this agent itself
    local: Addresses
    remote: Addresses
    lengths: Addresses
    region_of: npt.NDArray[np.intp]  # [N]: which of `regions` holds remote[i]
    regions: tuple[Region, ...]

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


class Post(ABC):
    """A posted transfer."""

    @abstractmethod
    def done(self) -> bool:
        """False while bytes are moving. Raises a nixlError when the transfer failed; then it is settled."""

    @abstractmethod
    def cancel(self) -> bool:
        """True once it is certain that no byte of it will land any more."""


class Settled(Post):
    """A transfer that was over when it was posted."""

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return True


SETTLED = Settled()


class Backend(ABC):
    """All methods may be called from any thread and raise only nixlErrors.

    `post` calls `complete` after the last byte has landed, to send the transfer's notification; a notification never
    overtakes its data. After `remove_peer` has returned and the posts then running have, nothing lands from that peer.
    """

    name: ClassVar[str]
    mem_types: ClassVar[tuple[MemType, ...]]

    @classmethod
    @abstractmethod
    def plugin_params(cls) -> dict[str, str]:
        """The parameters it takes, with their defaults."""

    @abstractmethod
    def params(self) -> dict[str, str]:
        """The parameters in force."""

    @abstractmethod
    def register(self, mem_type: MemType, address: int, num_bytes: int, device: int) -> Region:
        """Raises nixlBackendError for memory that this backend cannot offer to peers."""

    @abstractmethod
    def deregister(self, region: Region) -> None: ...

    @abstractmethod
    def connection_info(self) -> str:
        """How peers reach this agent."""

    @abstractmethod
    def add_peer(self, name: str, connection_info: str) -> None:
        """No traffic yet. Raises nixlMismatchError when it cannot be read, nixlNotAllowedError when it differs."""

    @abstractmethod
    def remove_peer(self, name: str) -> None: ...

    @abstractmethod
    def connect(self, name: str) -> None:
        """Raises nixlRemoteDisconnectError when the peer is gone, nixlBackendError when it does not answer in time."""

    @abstractmethod
    def post(self, plan: CopyPlan, complete: Callable[[], None]) -> Post:
        """Starts moving bytes, perhaps to the end. Raises as `connect` does."""

    @abstractmethod
    def notify(self, name: str, message: bytes) -> None:
        """To a peer, or to this agent itself. Raises as `connect` does."""

    @abstractmethod
    def take_notifs(self) -> list[tuple[str, bytes]]:
        """All (sender, message) that came since the last call, oldest first."""

    @abstractmethod
    def close(self) -> None:
        """Frees sockets, threads and mappings. A second call does nothing."""
