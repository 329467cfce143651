"""Rollouts, scores and tool calls as JSON and packed streams; decoding is bit-exact."""

import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import compress
from typing import Any, TypeAlias, final

from luyen.base.files import plain
from luyen.base.records import (
    Branch,
    CallStatus,
    ExpertRoutes,
    GroupId,
    Rollout,
    Score,
    Source,
    StopReason,
    ToolCall,
)


def call_tree(call: ToolCall) -> dict[str, Any]:
    """A call as JSON."""
    made = {f.name: getattr(call, f.name) for f in fields(call)}
    made |= {"arguments": dict(call.arguments), "status": call.status.value}
    optional = {"error": None, "reward": None, "seconds": 0.0, "attempts": 0}
    return {name: value for name, value in made.items() if optional.get(name, ...) != value}


def call_of(tree: Mapping[str, Any]) -> ToolCall:
    """Inverse of `call_tree`."""
    return ToolCall(**{**tree, "status": CallStatus(tree["status"])})


def score_tree(score: Score, *, is_timed: bool = True) -> dict[str, Any]:
    """A score with its parts as JSON.

    `is_timed=False` drops times and what judges said, so that equal scores are equal.
    """
    tree: dict[str, Any] = {"name": score.name, "value": plain(score.value)}
    if score.weight != 1.0:
        tree["weight"] = plain(score.weight)
    if score.parts:
        tree["parts"] = [score_tree(part, is_timed=is_timed) for part in score.parts]
    if score.error is not None:
        tree["error"] = score.error
    if score.by_turn:
        tree["by_turn"] = [[turn, plain(share)] for turn, share in score.by_turn]
    if score.raw is not None:
        tree["raw"] = plain(score.raw)
    if score.gated:
        tree["gated"] = True
    if score.combine != "sum":
        tree["combine"] = score.combine
    if score.turned:
        tree["turned"] = True
    if is_timed and score.seconds is not None:
        tree["seconds"] = plain(score.seconds)
    if is_timed and score.reply is not None:
        tree["reply"] = score.reply
    return tree


def score_of(tree: Mapping[str, Any]) -> Score:
    """Inverse of `score_tree`."""
    return Score(
        name=tree["name"],
        value=_number(tree["value"]),
        weight=float(tree.get("weight", 1.0)),
        parts=tuple(score_of(part) for part in tree.get("parts", ())),
        error=tree.get("error"),
        by_turn=tuple((turn, float(share)) for turn, share in tree.get("by_turn", ())),
        raw=_number(tree.get("raw")),
        gated=tree.get("gated", False),
        combine=tree.get("combine", "sum"),
        turned=tree.get("turned", False),
        seconds=_number(tree.get("seconds")),
        reply=tree.get("reply"),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


# Packed streams: the token streams of a branch as bytes.
#
# Every finished rollout is journaled and hashed, so this has to be fast: `struct` packs whole
# tuples, and log-probabilities and versions are stored for sampled tokens only, since no other
# token has them.

Pack: TypeAlias = Callable[["Rollout | Branch"], bytes]
"""Packs the streams of a branch: `stream_bytes` or a cache such as `PackedStreams`."""
_HEAD = struct.Struct("<IIB")
_MASS, _ROUTES = 1, 2
"""Streams that not every branch has, as bits of its head."""
IS_SAMPLED = bytes(int(code == Source.SAMPLED) for code in range(256))
"""Translation table from a byte of `Source` to a byte of the sampled mask."""
_SOURCES = {int(source): source for source in Source}


def stream_bytes(branch: Rollout | Branch) -> bytes:
    """Tokens, sources, turns, log-probabilities, versions; masses and routes where it has any."""
    count = len(branch.tokens)
    sources = bytes(branch.sources)
    sampled = sources.translate(IS_SAMPLED)
    num_sampled = sampled.count(1)
    parts = [
        _HEAD.pack(
            count,
            num_sampled,
            _MASS * bool(branch.kept_mass) + _ROUTES * (branch.routes is not None),
        ),
        struct.pack(f"<{count}i", *branch.tokens),
        sources,
        _whole_numbers(branch.turns),
        struct.pack(f"<{num_sampled}d", *compress(branch.logps, sampled)),
        _whole_numbers(tuple(compress(branch.versions, sampled))),
    ]
    if branch.kept_mass:
        parts.append(struct.pack(f"<{num_sampled}d", *compress(branch.kept_mass, sampled)))
    if branch.routes is not None:
        parts.append(branch.routes.to_bytes())
    return b"".join(parts)


@final
class PackedStreams:
    """Cache of packed streams, keyed by the identity of the tuples.

    A rollout is journaled when it finishes and hashed when its step ends; its tuples are the same
    objects both times, even if a score was added in between. Other tuples are packed again.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Any, ...], bytes]] = {}

    def __call__(self, branch: Rollout | Branch) -> bytes:
        """`stream_bytes` of the branch."""
        streams = (branch.tokens, branch.sources, branch.turns, branch.logps, branch.versions)
        streams = (*streams, branch.kept_mass, branch.routes)
        # The cache keeps the tuples alive, so that their ids are not reused.
        known = self._known.get(id(branch.tokens))
        if known is not None and all(a is b for a, b in zip(known[0], streams, strict=True)):
            return known[1]
        packed = stream_bytes(branch)
        self._known[id(branch.tokens)] = streams, packed
        return packed

    def forget(self) -> None:
        """Empty the cache."""
        self._known.clear()


def streams_of(data: bytes) -> dict[str, Any]:
    """Inverse of `stream_bytes`: the fields of a branch by name."""
    count, num_sampled, more = _HEAD.unpack_from(data)
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
        "logps": _spread(taken(num_sampled, "d"), sources),
        "versions": _spread(whole_numbers(num_sampled), sources),
    }
    if more & _MASS:
        streams["kept_mass"] = _spread(taken(num_sampled, "d"), sources)
    if more & _ROUTES:
        streams["routes"] = ExpertRoutes.from_bytes(data[place:])
    return streams


def _whole_numbers(numbers: tuple[Any, ...]) -> bytes:
    """All numbers, or only the first if all are equal, as most turns and versions are."""
    count = len(numbers)
    if count and numbers == numbers[:1] * count:
        return struct.pack("<?q", True, numbers[0])
    return struct.pack(f"<?{count}q", False, *numbers)


def _spread(numbers: tuple[Any, ...], sources: tuple[int, ...]) -> tuple[Any, ...]:
    left = iter(numbers)
    return tuple(next(left) if source == Source.SAMPLED else None for source in sources)


# Rollouts as JSON: streams are packed and base64-encoded, the rest is readable.


def rollout_tree(rollout: Rollout, pack: Pack = stream_bytes) -> dict[str, Any]:
    """A whole rollout as JSON; `pack` packs its streams."""
    group, score = rollout.group, rollout.score
    return {
        "group": [group.step, group.draw, group.uid],
        "sample": rollout.sample,
        "streams": _text(pack(rollout)),
        "earlier": [_text(pack(branch)) for branch in rollout.earlier],
        "stop": rollout.stop.value,
        "text": rollout.text,
        "score": None if score is None else score_tree(score),
        "fault": rollout.fault,
        "calls": [call_tree(call) for call in rollout.calls],
        "messages": [dict(message) for message in rollout.messages],
        "given": [list(pair) for pair in rollout.given],
        "notes": dict(rollout.notes),
    }


def rollout_of(tree: Mapping[str, Any]) -> Rollout:
    """Inverse of `rollout_tree`."""
    step, draw, uid = tree["group"]
    return Rollout(
        group=GroupId(step=step, draw=draw, uid=uid),
        sample=tree["sample"],
        **_streams(tree["streams"]),
        earlier=tuple(Branch(**_streams(streams)) for streams in tree["earlier"]),
        stop=StopReason(tree["stop"]),
        text=tree["text"],
        score=None if tree["score"] is None else score_of(tree["score"]),
        fault=tree["fault"],
        calls=tuple(call_of(call) for call in tree["calls"]),
        messages=tuple(tree["messages"]),
        given=tuple((turn, float(value)) for turn, value in tree["given"]),
        notes={name: float(value) for name, value in tree["notes"].items()},
    )


def _text(packed: bytes) -> str:
    return b2a_base64(packed, newline=False).decode()


def _streams(text: str) -> dict[str, Any]:
    return streams_of(a2b_base64(text))
