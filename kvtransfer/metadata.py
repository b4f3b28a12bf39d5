"""What agents tell each other of themselves: connection info and registered memory, as bytes.

JSON behind a magic, because it comes from a peer: reading it runs nothing, and everything in it is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtransfer.backends.base import Region
from kvtransfer.descs import MemType
from kvtransfer.errors import nixlMismatchError

_MAGIC = b"PDKVM1"
MAX_METADATA_BYTES = 16 << 20
_MAX = 1 << 64


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """`connections` and `regions` are by backend; partial metadata may lack either."""

    name: str
    connections: Mapping[str, str]
    regions: Mapping[str, tuple[Region, ...]]


def encode(metadata: AgentMetadata) -> bytes:
    content = {
        "name": metadata.name,
        "connections": dict(metadata.connections),
        "regions": {
            backend: [[r.mem_type.name, r.address, r.num_bytes, r.device, r.key] for r in regions]
            for backend, regions in metadata.regions.items()
        },
    }
    return _MAGIC + json.dumps(content, separators=(",", ":")).encode()


def decode(data: bytes) -> AgentMetadata:
    """Raises nixlMismatchError for anything that `encode` could not have written."""
    if not isinstance(data, bytes):
        raise TypeError(f"metadata = {type(data).__name__}: must be bytes")
    if not data.startswith(_MAGIC) or len(data) > MAX_METADATA_BYTES:
        raise nixlMismatchError(f"metadata of {len(data)} bytes that starts with {data[:6]!r}: not of this version")
    try:
        return _checked(json.loads(data[len(_MAGIC) :]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise nixlMismatchError(f"metadata cannot be read: {type(error).__name__}: {error}") from None


def _checked(content: Any) -> AgentMetadata:
    name, connections = content["name"], content["connections"]
    texts = [name, *connections.keys(), *connections.values()]
    if not name or not all(isinstance(text, str) for text in texts):
        raise ValueError("name and connections must be texts")
    regions = {backend: tuple(_region(*row) for row in rows) for backend, rows in content["regions"].items()}
    return AgentMetadata(name, connections, regions)


def _region(mem_type: str, address: int, num_bytes: int, device: int, key: str) -> Region:
    numbers = (address, num_bytes, device)
    if not all(type(n) is int and 0 <= n < _MAX for n in numbers) or address + num_bytes > _MAX:
        raise ValueError(f"region {numbers}: must be integers within 64 bits")
    if type(key) is not str:
        raise TypeError(f"region key {key!r}: must be a text")
    return Region(MemType[mem_type], address, num_bytes, device, key)
