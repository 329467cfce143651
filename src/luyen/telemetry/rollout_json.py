"""A rollout as plain data, and back to the last bit: streams are packed, the rest is readable."""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from luyen.base.records import Branch, GroupId, Rollout, Source, StopReason
from luyen.telemetry.record_trees import call_of, call_tree, score_of, score_tree

_STREAMS = tuple(field.name for field in fields(Branch))


def rollout_tree(rollout: Rollout) -> dict[str, Any]:
    """Everything a rollout holds, as JSON can hold it."""
    group, score = rollout.group, rollout.score
    return {
        "group": [group.step, group.draw, group.uid],
        "sample": rollout.sample,
        "streams": _packed(rollout),
        "earlier": [_packed(branch) for branch in rollout.earlier],
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
    """What `rollout_tree` was given."""
    step, draw, uid = tree["group"]
    return Rollout(
        group=GroupId(step=step, draw=draw, uid=uid),
        sample=tree["sample"],
        **_unpacked(tree["streams"]),
        earlier=tuple(Branch(**_unpacked(streams)) for streams in tree["earlier"]),
        stop=StopReason(tree["stop"]),
        text=tree["text"],
        score=None if tree["score"] is None else score_of(tree["score"]),
        fault=tree["fault"],
        calls=tuple(call_of(call) for call in tree["calls"]),
        messages=tuple(tree["messages"]),
        given=tuple((turn, float(value)) for turn, value in tree["given"]),
        notes={name: float(value) for name, value in tree["notes"].items()},
    )


def _packed(tokens: Rollout | Branch) -> dict[str, Any]:
    return {name: _pack(getattr(tokens, name)) for name in _STREAMS}


def _unpacked(streams: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _unpack(packed) for name, packed in streams.items()}
    return {**found, "sources": tuple(Source(source) for source in found["sources"])}


def _pack(values: Sequence[int | float | None]) -> list[str]:
    """Type, the bytes of the numbers, and which places have one (empty: all)."""
    present = bytes(value is not None for value in values)
    numbers = [value for value in values if value is not None]
    kind = "d" if any(isinstance(number, float) for number in numbers) else "q"
    places = "" if all(present) else _text(present)
    return [kind, _text(array(kind, numbers).tobytes()), places]


def _unpack(packed: Sequence[str]) -> tuple[Any, ...]:
    kind, data, places = packed
    numbers = array(kind, base64.b64decode(data)).tolist()
    if not places:
        return tuple(numbers)
    left = iter(numbers)
    return tuple(next(left) if present else None for present in base64.b64decode(places))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
