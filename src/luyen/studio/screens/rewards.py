"""The screen of rewards: components over time, faults, and what judges said about rollouts."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from luyen.base.input_files import parse_json
from luyen.base.secrets import masked
from luyen.studio.screens.rollout_index import RolloutIndex
from luyen.studio.screens.rollout_query import read_columns
from luyen.studio.screens.server_cache import Studio

_POINTS = 400
_MOST_ANSWERS = 50
_MOST_FILES = 8
_MOST_DEPTH = 50
_MOST_TEXT = 20_000
Row = dict[str, Any]


def rewards(studio: Studio, run_id: str) -> dict[str, Any]:
    """Components of the reward over time, faults, what judges said and what they cost."""
    known = studio.run(run_id)
    table = studio.table(known)
    names = [n for n in table.names if n.startswith("reward/") and n.endswith("/mean")]
    index = studio.rollouts(known, "train")
    has_judge = any(name.startswith("judging/") for name in table.names)
    faults: list[dict[str, Any]] = []
    for step in index.steps[-200:]:
        part = index.part(step)
        if part is None or not (part["fault"] > 0).any():
            continue
        for code in sorted({int(c) for c in part["fault"] if c}):
            places = (part["fault"] == code).nonzero()[0]
            faults.append(
                {
                    "step": step,
                    "name": index.faults.names[code],
                    "count": len(places),
                    "sample": int(places[0]),
                }
            )
    return {
        "components": [
            {"name": name.split("/")[1] if name != "reward/mean" else "reward", "metric": name,
             "series": table.curve(name, points=_POINTS)._asdict()}
            for name in ["reward/mean", *(n for n in names if n != "reward/mean")]
            if name in table.names
        ],
        "faults": faults,
        "judges": judge_answers(index) if has_judge else [],
        "judging": {
            name: table.curve(name, points=_POINTS)._asdict()
            for name in table.names
            if name.startswith("judging/")
        },
    }  # fmt: skip


def judge_answers(index: RolloutIndex) -> list[Row]:
    """Replies of judges with their scores, the newest step first; a bounded number of them.

    Files that cannot be read are left out: the screen of faults names them.
    """
    found: list[Row] = []
    for step in sorted(index.steps, reverse=True)[:_MOST_FILES]:
        try:
            table = read_columns(index, step, ["score", "text"], None)
        except (OSError, ValueError, LookupError, pa.ArrowException):
            continue
        for row, entry in enumerate(table.to_pylist()):
            for path, node in _judged(entry.get("score")):
                found.append(_answer(step, row, path, node, entry.get("text") or ""))
                if len(found) == _MOST_ANSWERS:
                    return found
    return found


def _answer(step: int, row: int, path: str, node: Row, answer: str) -> Row:
    value = _number(node.get("raw"))
    error = node.get("error")
    return {
        "step": step,
        "index": row,
        "component": path,
        "score": _number(node.get("value")) if value is None else value,
        "seconds": _number(node.get("seconds")),
        "fault": None if error is None else masked(str(error)),
        "answer": answer[:_MOST_TEXT],
        "reply": masked(node["reply"][:_MOST_TEXT]),
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _judged(text: str | None) -> Iterator[tuple[str, Row]]:
    """Nodes of a score tree with the reply of a judge, by their path."""
    if not text or '"reply"' not in text:
        return
    try:
        tree = parse_json(text)
    except ValueError:
        return
    yield from _nodes(tree, "", 0)


def _nodes(node: Any, prefix: str, depth: int) -> Iterator[tuple[str, Row]]:
    if not isinstance(node, dict) or depth > _MOST_DEPTH:
        return
    path = f"{prefix}{node.get('name')}"
    if isinstance(node.get("reply"), str):
        yield path, node
    parts = node.get("parts")
    for part in parts if isinstance(parts, list) else ():
        yield from _nodes(part, f"{path}/" if prefix or depth else "", depth + 1)
