"""The streams of a branch as bytes, and back to the last bit.

Every finished rollout is written down and hashed, so this has to be quick: whole tuples go through
C, and log-probabilities and versions are kept for sampled tokens only, which are those that have
them.
"""

import struct
from collections.abc import Callable
from itertools import compress
from typing import Any, TypeAlias, final

from luyen.base.records import Branch, Rollout, Source

Pack: TypeAlias = Callable[["Rollout | Branch"], bytes]
"""What makes bytes of a branch: `stream_bytes`, or something that remembers."""
_HEAD = struct.Struct("<IIB")
IS_SAMPLED = bytes(int(code == Source.SAMPLED) for code in range(256))
"""Translates bytes of sources into those of a mask."""
_SOURCES = {int(source): source for source in Source}


def stream_bytes(branch: Rollout | Branch) -> bytes:
    """Tokens, sources, turns, log-probabilities, versions, and kept masses where there are any."""
    count = len(branch.tokens)
    sources = bytes(branch.sources)
    sampled = sources.translate(IS_SAMPLED)
    drawn = sampled.count(1)
    parts = [
        _HEAD.pack(count, drawn, bool(branch.kept_mass)),
        struct.pack(f"<{count}i", *branch.tokens),
        sources,
        _whole_numbers(branch.turns),
        struct.pack(f"<{drawn}d", *compress(branch.logps, sampled)),
        _whole_numbers(tuple(compress(branch.versions, sampled))),
    ]
    if branch.kept_mass:
        parts.append(struct.pack(f"<{drawn}d", *compress(branch.kept_mass, sampled)))
    return b"".join(parts)


@final
class PackedStreams:
    """Streams that were packed before, found again by the very tuples they were made from.

    A rollout is written down when it ends and hashed when its step does; the tuples between are the
    same objects, also where a score was added. Others are packed anew.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Any, ...], bytes]] = {}

    def __call__(self, branch: Rollout | Branch) -> bytes:
        """`stream_bytes` of the branch."""
        streams = (branch.tokens, branch.sources, branch.turns, branch.logps, branch.versions)
        streams = (*streams, branch.kept_mass)
        # The tuples are held, so that their ids stay theirs.
        known = self._known.get(id(branch.tokens))
        if known is not None and all(a is b for a, b in zip(known[0], streams, strict=True)):
            return known[1]
        packed = stream_bytes(branch)
        self._known[id(branch.tokens)] = streams, packed
        return packed

    def forget(self) -> None:
        """Let all of them go."""
        self._known.clear()


def streams_of(data: bytes) -> dict[str, Any]:
    """What `stream_bytes` was given, by the names of the fields of a branch."""
    count, drawn, has_mass = _HEAD.unpack_from(data)
    place = _HEAD.size

    def taken(number: int, kind: str) -> tuple[Any, ...]:
        nonlocal place
        found = struct.unpack_from(f"<{number}{kind}", data, place)
        place += struct.calcsize(f"<{number}{kind}")
        return found

    def whole_numbers(number: int) -> tuple[Any, ...]:
        (is_same,) = taken(1, "?")
        return taken(1, "q") * number if is_same else taken(number, "q")

    tokens = taken(count, "i")
    sources = taken(count, "B")
    streams: dict[str, Any] = {
        "tokens": tokens,
        "sources": tuple(_SOURCES[source] for source in sources),
        "turns": whole_numbers(count),
        "logps": _spread(taken(drawn, "d"), sources),
        "versions": _spread(whole_numbers(drawn), sources),
    }
    return streams | ({"kept_mass": _spread(taken(drawn, "d"), sources)} if has_mass else {})


def _whole_numbers(numbers: tuple[Any, ...]) -> bytes:
    """All of them, or the first one where they are equal, which most turns and versions are."""
    count = len(numbers)
    if count and numbers == numbers[:1] * count:
        return struct.pack("<?q", True, numbers[0])
    return struct.pack(f"<?{count}q", False, *numbers)


def _spread(numbers: tuple[Any, ...], sources: tuple[int, ...]) -> tuple[Any, ...]:
    left = iter(numbers)
    return tuple(next(left) if source == Source.SAMPLED else None for source in sources)
