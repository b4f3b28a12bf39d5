"""The agents that this one knows, and what they registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtransfer.backends.base import Backend, Region
from kvtransfer.descs import XferDescs
from kvtransfer.errors import nixlBackendError, nixlInvalidParamError, nixlNotFoundError
from kvtransfer.metadata import AgentMetadata
from kvtransfer.plan import Side, locate


@dataclass(slots=True, eq=False)
class Remote:
    """A known agent. `regions` is by backend; a backend without connection info is not in it."""

    name: str
    regions: dict[str, dict[Region, None]] = field(default_factory=dict)  # an ordered set a backend


class Remotes:
    """Not thread-safe; the agent holds a lock."""

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name
        self._remotes: dict[str, Remote] = {}

    def load(self, metadata: AgentMetadata, backends: Mapping[str, Backend]) -> Remote:
        """Adds an agent, or more of its memory. Raises as Agent.add_remote_agent does."""
        if metadata.name == self._own_name:
            raise nixlInvalidParamError(f"metadata of {metadata.name!r}: that is this agent's own name")
        remote = self._remotes.get(metadata.name)
        if remote is None and not metadata.connections:
            raise nixlNotFoundError(f"metadata of {metadata.name!r} has no connection info and the agent is not known")
        common = [name for name in metadata.connections if name in backends]
        if metadata.connections and not common:
            raise nixlBackendError(
                f"agent {metadata.name!r} has backends {', '.join(metadata.connections)}, we {', '.join(backends)}"
            )
        for name in common:
            backends[name].add_peer(metadata.name, metadata.connections[name])
        remote = self._remotes.setdefault(metadata.name, remote or Remote(metadata.name))
        for name in common:
            remote.regions.setdefault(name, {})
        for name, regions in metadata.regions.items():
            if name in remote.regions:
                remote.regions[name].update(dict.fromkeys(regions))
        return remote

    def remove(self, name: str, backends: Mapping[str, Backend]) -> None:
        remote = self._remotes.pop(name, None)
        for backend in remote.regions if remote else ():
            backends[backend].remove_peer(name)

    def get(self, name: str) -> Remote:
        """Raises nixlNotFoundError."""
        if name not in self._remotes:
            raise nixlNotFoundError(f"agent {name!r} was not added, or was removed")
        return self._remotes[name]

    def knows(self, remote: Remote) -> bool:
        """Whether it is still the agent of that name, not removed and added again since."""
        return self._remotes.get(remote.name) is remote


def sides_of(descs: XferDescs, regions: Mapping[str, dict[Region, None]]) -> dict[str, Side]:
    """The descriptors checked against each backend that holds all of them. Raises nixlNotFoundError when none does."""
    sides: dict[str, Side] = {}
    lost = nixlNotFoundError("no backend has any memory registered")
    for name, registered in regions.items():
        try:
            sides[name] = locate(descs, list(registered))
        except nixlNotFoundError as error:
            lost = error
    if not sides:
        raise lost
    return sides
