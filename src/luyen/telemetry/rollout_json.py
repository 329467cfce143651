"""A rollout as plain data, and back to the last bit: streams are packed, the rest is readable."""

from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping
from typing import Any

from luyen.base.records import Branch, GroupId, Rollout, StopReason
from luyen.telemetry.record_trees import call_of, call_tree, score_of, score_tree
from luyen.telemetry.streams import Pack, stream_bytes, streams_of


def rollout_tree(rollout: Rollout, pack: Pack = stream_bytes) -> dict[str, Any]:
    """Everything a rollout holds, as JSON can hold it; `pack` makes bytes of its streams."""
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
    """What `rollout_tree` was given."""
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
