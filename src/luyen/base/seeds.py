"""Every random choice has an address: numbers that depend on where they are used, not on when.

A key is a hash of an address such as (run seed, "rollout", step, draw, uid, sample, turn). The
numbers sampled under it are a second hash of the key and a position. Nothing is consumed, so
neither batching, order nor a restart can change a sample.
"""

import hashlib

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def derive_key(seed: int, purpose: str, *path: int | str) -> int:
    """A 64-bit key for one address; different addresses give unrelated keys.

    Example:
        >>> derive_key(0, "rollout", 3, "a1", 0) == derive_key(0, "rollout", 3, "a1", 1)
        False
    """
    # The type and length of each part are hashed too, so that (1, "2") and ("12",) cannot meet.
    parts = "".join(f"{type(p).__name__[0]}{len(str(p))}:{p}" for p in (seed, purpose, *path))
    return int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=8).digest(), "big")


def mix(key: int, position: int) -> int:
    """The 64 random bits at a position under a key (the finaliser of SplitMix64)."""
    z = (key + (position + 1) * _STEP) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) with 32 random bits.

    Example:
        >>> 0 <= uniform(derive_key(0, "demo"), 0) < 1
        True
    """
    return (mix(key, position) >> 32) / 2**32


def shuffled(count: int, key: int) -> list[int]:
    """A permutation of range(count) that depends on the key alone (Fisher-Yates)."""
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = mix(key, last) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order
