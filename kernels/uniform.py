"""A uniform number for each (seed, position), the same in every process: integer arithmetic, no state, no torch.

Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Any pod that continues a sequence draws what the pod before it would have drawn.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np

Words: TypeAlias = tuple[Any, Any, Any, Any]  # of 32 bits: four integers, or four uint64 arrays of them

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_AHEAD = 128  # positions, at which an answer asks for one after the other: together they take what twenty take alone


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. Both arguments count modulo 2^64."""
    position &= _MASK64
    return _uniforms(seed & _MASK64, position - position % _AHEAD)[position % _AHEAD]


@functools.lru_cache(maxsize=256)
def _uniforms(seed: int, first: int) -> list[float]:
    """Of positions first .. first + _AHEAD - 1."""
    positions = np.arange(_AHEAD, dtype=np.uint64) + np.uint64(first)
    nothing = np.zeros(_AHEAD, dtype=np.uint64)
    counter = (positions & _MASK32, positions >> 32, nothing, nothing)
    high, low, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32))
    numbers: list[float] = (((high << 32 | low) >> 11) * 2.0**-53).tolist()
    return numbers


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds over four counter words with a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ k0, product1 & _MASK32, product0 >> 32 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = k0 + _KEY_STEPS[0] & _MASK32, k1 + _KEY_STEPS[1] & _MASK32
    return c0, c1, c2, c3
