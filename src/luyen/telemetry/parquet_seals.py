"""Parquet files that say of themselves whether they are as they were written.

The metadata of the footer holds the SHA-256 of the whole file, taken while zeros stand in its
place. Checksums of pages would leave the footer unguarded, and a changed bit there can move a
column.
"""

import hashlib

KEY = b"luyen.seal"
"""Name of the entry in the metadata."""
BLANK = b"0" * 64
"""What stands in the entry until the file is sealed."""
_HEADER = b"\x18\x40"
"""How the footer's encoding begins the value of an entry: a string of 64 bytes."""


def sealed(data: bytes) -> bytes:
    """The file with its seal; it was written with `BLANK` under `KEY` in its metadata.

    Example:
        >>> broken = bytearray(sealed(KEY + _HEADER + BLANK + b"PAR1"))
        >>> is_as_written(bytes(broken))
        True
        >>> broken[-1] ^= 1
        >>> is_as_written(bytes(broken))
        False
    """
    place = _place(data)
    assert place is not None, "the metadata has no entry for the seal"
    assert data[place : place + len(BLANK)] == BLANK, "the file has a seal already"
    return _with(data, place, _hash(data))


def is_as_written(data: bytes) -> bool | None:
    """Whether the file fits its seal; None when it has none."""
    place = _place(data)
    if place is None:
        return None
    seal = data[place : place + len(BLANK)]
    return seal == _hash(_with(data, place, BLANK))


def _place(data: bytes) -> int | None:
    """Where the seal stands. Metadata comes last in the footer, so rollouts cannot imitate it."""
    entry = KEY + _HEADER
    found = data.rfind(entry)
    return None if found < 0 else found + len(entry)


def _with(data: bytes, place: int, seal: bytes) -> bytes:
    return data[:place] + seal + data[place + len(BLANK) :]


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
