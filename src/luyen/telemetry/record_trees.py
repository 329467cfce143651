"""Scores and tool calls as JSON, and back; what is at its default is left out."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from luyen.base.calls import CallStatus, ToolCall
from luyen.base.files import plain
from luyen.base.records import Score


def call_tree(call: ToolCall) -> dict[str, Any]:
    """A call as JSON."""
    made = {f.name: getattr(call, f.name) for f in fields(call)}
    made |= {"arguments": dict(call.arguments), "status": call.status.value}
    optional = {"error": None, "reward": None, "seconds": 0.0, "attempts": 0}
    return {name: value for name, value in made.items() if optional.get(name, ...) != value}


def call_of(tree: Mapping[str, Any]) -> ToolCall:
    """What `call_tree` was given."""
    return ToolCall(**{**tree, "status": CallStatus(tree["status"])})


def score_tree(score: Score, *, is_timed: bool = True) -> dict[str, Any]:
    """A score with its parts as JSON; without `is_timed`, equal scores give equal trees."""
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
    return tree


def score_of(tree: Mapping[str, Any]) -> Score:
    """What `score_tree` was given."""
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
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
