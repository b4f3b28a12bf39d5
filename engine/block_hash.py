"""Names for the content of full blocks: a hash over the block's tokens and everything before them.

A block's KV depends on its own tokens, on all earlier tokens and on the model, so its hash is chained: the root covers
the model and the request's cache salt, each block's hash covers its parent's hash and its own tokens. Equal hashes
mean equal KV; blocks of different models or salts never meet.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence as Seq

DIGEST_BYTES = 16  # 128 bits: no accidental collision in any cache, and chosen collisions cost 2**64 hashes


def root_hash(*parts: str) -> bytes:
    """The parent of a sequence's first block. Parts are kept apart: ("ab", "c") and ("a", "bc") differ."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=DIGEST_BYTES, person=b"pdserve-root").digest()


def block_hash(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Hash of one full block of `token_ids` that follows the block (or root) hashed `parent`."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES, person=b"pdserve-block").digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Seq[int], *, block_size: int, num_blocks: int) -> None:
    """Appends to `hashes`, those of the leading blocks of `token_ids`, the ones it lacks up to `num_blocks`."""
    parent = hashes[-1] if hashes else root
    for block in range(len(hashes), num_blocks):
        parent = block_hash(parent, token_ids[block * block_size : (block + 1) * block_size])
        hashes.append(parent)
