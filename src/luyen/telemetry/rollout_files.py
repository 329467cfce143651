"""The rollouts of a step as a Parquet file, and back: every token, float and score as it was.

Streams are lists beside the tokens. Numbers are stored as 64-bit floats, so nothing is rounded; the
reward is a column of its own for people, and the whole tree of scores is JSON beside it.
"""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from luyen.base.errors import UserError
from luyen.base.files import plain, write_whole
from luyen.base.records import GroupId, Rollout, Score, Source, StopReason

SCHEMA = 1
"""Version of the columns; a reader refuses a later one."""
_VERSION = b"luyen.rollouts"

_COLUMNS = pa.schema(
    [
        ("group", pa.string()),
        ("step", pa.int64()),
        ("draw", pa.int64()),
        ("uid", pa.string()),
        ("sample", pa.int64()),
        ("tokens", pa.list_(pa.int64())),
        ("sources", pa.list_(pa.int8())),
        ("turns", pa.list_(pa.int32())),
        ("logps", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("stop", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.string()),
        ("advantage", pa.list_(pa.float64())),
        ("fault", pa.string()),
    ],
    metadata={_VERSION: str(SCHEMA).encode()},
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A rollout with what the step made of it.

    Example:
        >>> rollout = Rollout(group=GroupId(step=0, draw=0, uid="a"), sample=0, tokens=(5,),
        ...     sources=(Source.SAMPLED,), turns=(0,), logps=(-0.5,), versions=(0,),
        ...     stop=StopReason.ANSWERED, text="ok")
        >>> RecordedRollout(rollout=rollout, advantages=(1.0,)).advantages
        (1.0,)
    """

    rollout: Rollout
    """The rollout, judged or not."""
    advantages: tuple[float | None, ...] | None = None
    """Advantage of each token, None where it does not train; None as a whole: it was not used."""

    def __post_init__(self) -> None:
        wanted = len(self.rollout.tokens)
        given = wanted if self.advantages is None else len(self.advantages)
        assert given == wanted, f"{given} advantages for {wanted} tokens"


def write_rollouts(path: Path, rollouts: Iterable[RecordedRollout]) -> None:
    """Write the rollouts of a step, whole or not at all, sorted so that order never matters."""
    rows = [_row(r) for r in sorted(rollouts, key=lambda r: r.rollout.key)]
    table = pa.Table.from_pylist(rows, schema=_COLUMNS)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue())


def read_rollouts(path: Path) -> list[RecordedRollout]:
    """The rollouts of a step; a UserError when the file is missing or damaged."""
    try:
        table = pq.read_table(io.BytesIO(path.read_bytes()))
    except (OSError, pa.ArrowException) as error:
        why = f"it cannot be read: {error}"
        raise UserError("rollout file", str(path), why, "restore it from a copy") from error
    version = (table.schema.metadata or {}).get(_VERSION, b"0")
    if not 1 <= int(version) <= SCHEMA:
        why = f"its columns follow version {int(version)}, and this version reads up to {SCHEMA}"
        raise UserError("rollout file", str(path), why, "install a newer luyen")
    return [_record(row) for row in table.to_pylist()]


def _row(recorded: RecordedRollout) -> dict[str, Any]:
    rollout = recorded.rollout
    group, score = rollout.group, rollout.score
    return {
        "group": str(group),
        "step": group.step,
        "draw": group.draw,
        "uid": group.uid,
        "sample": rollout.sample,
        "tokens": rollout.tokens,
        "sources": [int(source) for source in rollout.sources],
        "turns": rollout.turns,
        "logps": rollout.logps,
        "versions": rollout.versions,
        "stop": rollout.stop.value,
        "text": rollout.text,
        "reward": None if score is None else score.value,
        "score": None if score is None else json.dumps(_tree(score), ensure_ascii=False),
        "advantage": recorded.advantages,
        "fault": rollout.fault,
    }


def _record(row: dict[str, Any]) -> RecordedRollout:
    rollout = Rollout(
        group=GroupId(step=row["step"], draw=row["draw"], uid=row["uid"]),
        sample=row["sample"],
        tokens=tuple(row["tokens"]),
        sources=tuple(Source(source) for source in row["sources"]),
        turns=tuple(row["turns"]),
        logps=tuple(row["logps"]),
        versions=tuple(row["versions"]),
        stop=StopReason(row["stop"]),
        text=row["text"],
        score=None if row["score"] is None else _score(json.loads(row["score"])),
        fault=row["fault"],
    )
    advantages = row["advantage"]
    return RecordedRollout(
        rollout=rollout, advantages=None if advantages is None else tuple(advantages)
    )


def _tree(score: Score) -> dict[str, Any]:
    """A score as JSON; what is at its default is left out."""
    tree: dict[str, Any] = {"name": score.name, "value": plain(score.value)}
    if score.weight != 1.0:
        tree["weight"] = plain(score.weight)
    if score.parts:
        tree["parts"] = [_tree(part) for part in score.parts]
    if score.error is not None:
        tree["error"] = score.error
    return tree


def _score(tree: dict[str, Any]) -> Score:
    value = tree["value"]
    return Score(
        name=tree["name"],
        value=None if value is None else float(value),
        weight=float(tree.get("weight", 1.0)),
        parts=tuple(_score(part) for part in tree.get("parts", ())),
        error=tree.get("error"),
    )
