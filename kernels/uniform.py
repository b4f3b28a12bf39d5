"""A uniform number for each (seed, position), the same in every process: pure integer arithmetic, no state, no torch.

Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Any pod that continues a sequence draws what the pod before it would have drawn.
"""

from __future__ import annotations

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. Both arguments count modulo 2^64."""
    position &= _MASK64
    seed &= _MASK64
    high, low, _, _ = philox4x32((position & _MASK32, position >> 32, 0, 0), (seed & _MASK32, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over four 32-bit counter words with a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ k0, product1 & _MASK32, product0 >> 32 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = k0 + _KEY_STEPS[0] & _MASK32, k1 + _KEY_STEPS[1] & _MASK32
    return c0, c1, c2, c3
