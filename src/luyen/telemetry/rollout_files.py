"""Reads and writes the rollouts of a step as a Parquet file with a checksum: every token and score.

Token streams are list columns. Numbers are stored as 64-bit floats, so nothing is rounded. The
total reward is a column of its own; the score tree, the tool calls and the messages are JSON
columns, since tools and templates decide their shape.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from luyen.base.errors import UserError
from luyen.base.files import write_whole, writing
from luyen.base.input_files import read_bytes, require_file
from luyen.base.records import Branch, ExpertRoutes, GroupId, Rollout, Source, StopReason
from luyen.telemetry.rollout_codec import call_of, call_tree, score_of, score_tree

pc: Any = pyarrow.compute
"""Its functions are made when it is imported, so that no type checker knows them."""

# Parquet files with a checksum of the whole file.
#
# The footer metadata holds the SHA-256 of the file, computed with zeros in its place. Parquet's own
# page checksums do not cover the footer, where a flipped bit can move a column.

CHECKSUM = b"luyen.seal"
"""Name of the entry in the metadata."""
NO_CHECKSUM = b"0" * 64
"""Placeholder in the entry until the checksum is computed."""
_HEADER = b"\x18\x40"
"""Thrift header of the value of the entry: a string of 64 bytes."""


def with_checksum(data: bytes) -> bytes:
    """The file with its checksum in the place of `NO_CHECKSUM`, its `CHECKSUM` metadata entry.

    Example:
        >>> broken = bytearray(with_checksum(CHECKSUM + _HEADER + NO_CHECKSUM + b"PAR1"))
        >>> has_valid_checksum(bytes(broken))
        True
        >>> broken[-1] ^= 1
        >>> has_valid_checksum(bytes(broken))
        False
    """
    place = _place(data)
    assert place is not None, "the metadata has no entry for the checksum"
    assert data[place : place + len(NO_CHECKSUM)] == NO_CHECKSUM, "the file has a checksum already"
    return _with(data, place, _hash(data))


def has_valid_checksum(data: bytes) -> bool | None:
    """Whether the checksum matches the file; None when it has none."""
    place = _place(data)
    if place is None:
        return None
    stored = data[place : place + len(NO_CHECKSUM)]
    return stored == _hash(_with(data, place, NO_CHECKSUM))


def _place(data: bytes) -> int | None:
    """Offset of the checksum. Metadata comes last in the footer: rollouts cannot fake it."""
    entry = CHECKSUM + _HEADER
    found = data.rfind(entry)
    return None if found < 0 else found + len(entry)


def _with(data: bytes, place: int, checksum: bytes) -> bytes:
    return data[:place] + checksum + data[place + len(NO_CHECKSUM) :]


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


SCHEMA = 4
"""Version of the file; a reader refuses a later one."""
_WITH_CHECKSUM = 4
"""The first version whose files have a checksum."""
_VERSION = b"luyen.rollouts"
_STEP = b"luyen.step"
"""The step that trained on the file; with completion order its groups may be of other steps."""
_ROW_GROUP = 512
_VERIFIED = 2**26
"""Bytes of a file up to which reading one rollout verifies all of it."""
_MOST_BYTES = 2**34
"""Size of the largest file that is read."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = json.JSONEncoder(ensure_ascii=False, default=repr)
_ESCAPED = json.JSONEncoder(default=repr)

Advantages: TypeAlias = tuple[float | None, ...]
"""Advantage of each token of a branch, None where it does not train."""

_STREAMS = (
    ("tokens", pa.list_(pa.int64())),
    ("sources", pa.list_(pa.int8())),
    ("turns", pa.list_(pa.int32())),
    ("logps", pa.list_(pa.float64())),
    ("versions", pa.list_(pa.int64())),
    ("kept_mass", pa.list_(pa.float64())),
    ("routes", pa.binary()),
    ("advantage", pa.list_(pa.float64())),
)
_TURN_VALUE = pa.struct([("turn", pa.int32()), ("value", pa.float64())])
_COLUMNS = pa.schema(
    [
        ("group", pa.string()),
        ("step", pa.int64()),
        ("draw", pa.int64()),
        ("uid", pa.string()),
        ("sample", pa.int64()),
        *_STREAMS,
        ("stop", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.string()),
        ("fault", pa.string()),
        ("calls", pa.string()),
        ("messages", pa.string()),
        ("earlier", pa.list_(pa.struct(_STREAMS))),
        ("given", pa.list_(_TURN_VALUE)),
        ("notes", pa.map_(pa.string(), pa.float64())),
        ("baseline", pa.float64()),
        ("trainer_logps", pa.list_(pa.float64())),
        ("length", pa.int32()),
        ("last_turn", pa.int32()),
        ("version", pa.int64()),
        ("mean_advantage", pa.float64()),
        ("tool_names", pa.list_(pa.string())),
    ],
    metadata={_VERSION: str(SCHEMA).encode(), CHECKSUM: NO_CHECKSUM},
)
_WITHOUT_NULLS = (
    *("step", "draw", "uid", "sample", "tokens", "sources", "turns"),
    *("stop", "text"),
)
_REQUIRED = (*_WITHOUT_NULLS, "logps", "versions", "advantage", "reward", "score", "fault")
"""Columns of every version."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A rollout with its advantages in the step.

    Example:
        >>> rollout = Rollout(group=GroupId(step=0, draw=0, uid="a"), sample=0, tokens=(5,),
        ...     sources=(Source.SAMPLED,), turns=(0,), logps=(-0.5,), versions=(0,),
        ...     stop=StopReason.ANSWERED, text="ok")
        >>> RecordedRollout(rollout=rollout, advantages=(1.0,)).advantages
        (1.0,)
    """

    rollout: Rollout
    """The rollout, scored or not."""
    advantages: Advantages | None = None
    """Advantages of its tokens; None: the step did not use it."""
    earlier: tuple[Advantages, ...] = ()
    """Advantages of the tokens of each earlier branch; empty when the step did not use it."""
    baseline: float | None = None
    """Greedy reward of its group, where the algorithm compares with one."""
    trainer_logps: Advantages | None = None
    """The trainer's log-probability of each token before the update; None: it was not measured."""

    def __post_init__(self) -> None:
        if self.advantages is None:
            assert not self.earlier, "advantages of earlier branches only"
            return
        parts, rows = (*self.rollout.earlier, self.rollout), (*self.earlier, self.advantages)
        assert len(rows) == len(parts), f"advantages of {len(rows)} of {len(parts)} branches"
        for part, row in zip(parts, rows, strict=True):
            wanted, given = len(part.tokens), len(row)
            assert given == wanted, f"{given} advantages for {wanted} tokens"


def write_rollouts(
    path: Path, rollouts: Iterable[RecordedRollout], *, step: int | None = None
) -> None:
    """Write the rollouts of a step atomically, sorted by key.

    Without a `step` it is the one that all of them were generated for.
    """
    rows = [_row(r) for r in sorted(rollouts, key=lambda r: r.rollout.key)]
    schema = _COLUMNS
    if step is not None:
        schema = schema.with_metadata({**(schema.metadata or {}), _STEP: b"%d" % step})
    table = pa.Table.from_pylist(rows, schema=schema)
    buffer = io.BytesIO()
    # Small row groups: a reader of one rollout decodes its neighbours, not the whole step.
    pq.write_table(table, buffer, compression="zstd", row_group_size=_ROW_GROUP)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, with_checksum(buffer.getvalue()))


def read_rollouts(
    path: Path, *, limit: int | None = None, step: int | None = None
) -> list[RecordedRollout]:
    """The rollouts of a step; a UserError when the file is missing or damaged.

    `limit` reads only the first rollouts. With `step`, a file of another step is refused; rollouts
    of validations carry step 0.
    """
    table = read_table(path)
    rows = table.slice(0, limit).to_pylist()
    stated = (table.schema.metadata or {}).get(_STEP)
    found = [row["step"] for row in rows] if stated is None else [int(stated)]
    strange = [other for other in found if step not in (None, other)]
    if strange:
        raise _unreadable(path, f"it holds rollouts of step {strange[0]}")
    return [_recorded(path, row) for row in rows]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One rollout of a file.

    Example:
        >>> StoredRollout.__slots__
        ('recorded', 'has_trainer_column')
    """

    recorded: RecordedRollout
    """The rollout."""
    has_trainer_column: bool
    """Whether the file was written by a version that records the trainer's log-probabilities."""

    @property
    def trainer_logps(self) -> Advantages | None:
        """The trainer's log-probabilities; None where they were not measured."""
        return self.recorded.trainer_logps


def read_rollout_at(path: Path, row: int) -> StoredRollout:
    """One rollout by its place in the file, decoding only its row group.

    The checksum of the whole file is verified up to 64 MB. A UserError where the file is damaged,
    an IndexError where it has no such row.
    """
    try:
        if require_file(path).stat().st_size <= _VERIFIED:
            table = read_table(path)
            if not 0 <= row < table.num_rows:
                raise IndexError(row)
            [entry] = table.slice(row, 1).to_pylist()
            return _stored(path, entry)
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if 0 <= row < count:
                    [entry] = file.read_row_group(group).slice(row, 1).to_pylist()
                    return _stored(path, entry)
                row -= count
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    raise IndexError(row)


def _stored(path: Path, entry: dict[str, Any]) -> StoredRollout:
    recorded = _recorded(path, entry)
    return StoredRollout(recorded=recorded, has_trainer_column="trainer_logps" in entry)


def _recorded(path: Path, entry: dict[str, Any]) -> RecordedRollout:
    try:
        return _record(entry)
    except RecursionError as error:
        raise _unreadable(path, "a cell is nested too deeply") from error
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise _unreadable(path, f"a row holds {type(error).__name__}: {error}") from error


def read_table(path: Path) -> pa.Table:
    """The columns of the file; its checksum is verified before anything is parsed."""
    try:
        data = read_bytes(path, most_bytes=_MOST_BYTES)
        fits = has_valid_checksum(data)
        if fits is False:
            raise _unreadable(path, "it is not as it was written")
        table = pq.read_table(io.BytesIO(data))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error
    version = (table.schema.metadata or {}).get(_VERSION, b"0")
    if not version.isdigit() or (fits is None and _WITH_CHECKSUM <= int(version) <= SCHEMA):
        raise _unreadable(path, "it is not as it was written")
    if not 1 <= int(version) <= SCHEMA:
        why = f"its columns follow version {int(version)}, and this version reads up to {SCHEMA}"
        raise UserError("rollout file", str(path), why, "install a newer luyen")
    return _typed(path, table)


def _typed(path: Path, table: pa.Table) -> pa.Table:
    """The table with the types of this version; a UserError where a column is missing or odd."""
    for name in _REQUIRED:
        if table.column_names.count(name) != 1:
            raise _unreadable(path, f"it has {table.column_names.count(name)} columns {name}")
    for field in _COLUMNS:
        place = table.schema.get_field_index(field.name)
        if place < 0:
            continue
        column = table.column(place)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise _unreadable(path, f"its column {field.name}: {error}") from error
            table = table.set_column(place, field, column)
        nulls = column.null_count
        if field.name in _WITHOUT_NULLS and pa.types.is_list(field.type):
            nulls += pc.list_flatten(column).null_count
        if field.name in _WITHOUT_NULLS and nulls:
            raise _unreadable(path, f"its column {field.name} has nulls")
    return table


def _unreadable(path: Path, why: object) -> UserError:
    return UserError(
        "rollout file", str(path), f"it cannot be read: {why}", "restore it from a copy"
    )


def _row(recorded: RecordedRollout) -> dict[str, Any]:
    rollout = recorded.rollout
    group, score = rollout.group, rollout.score
    rows = recorded.earlier or (None,) * len(rollout.earlier)
    return {
        "group": str(group),
        "step": group.step,
        "draw": group.draw,
        "uid": group.uid,
        "sample": rollout.sample,
        **_streams(rollout, recorded.advantages),
        "stop": rollout.stop.value,
        "text": rollout.text,
        "reward": None if score is None else score.value,
        "score": None if score is None else _json(score_tree(score)),
        "fault": rollout.fault,
        "calls": _json([call_tree(call) for call in rollout.calls]) if rollout.calls else "[]",
        "messages": _json([dict(m) for m in rollout.messages]) if rollout.messages else "[]",
        "earlier": [_streams(b, row) for b, row in zip(rollout.earlier, rows, strict=True)],
        "given": [{"turn": turn, "value": value} for turn, value in rollout.given],
        "notes": list(rollout.notes.items()),
        "baseline": recorded.baseline,
        "trainer_logps": _distinct(recorded),
        **_summary(recorded),
    }


def _distinct(recorded: RecordedRollout) -> Advantages | None:
    """The trainer's log-probabilities; an empty list stands for those of the sampler."""
    logps = recorded.trainer_logps
    return () if logps is not None and logps == _as_sampled(recorded) else logps


def _as_sampled(recorded: RecordedRollout) -> Advantages:
    """The sampler's log-probabilities of the tokens that train."""
    row = recorded.advantages or (None,) * len(recorded.rollout.tokens)
    pairs = zip(recorded.rollout.logps, row, strict=True)
    return tuple(None if advantage is None else logp for logp, advantage in pairs)


def _storable(name: str) -> str:
    """The text with `?` for each half of a surrogate pair: a column cannot hold those."""
    return name.encode(errors="replace").decode()


def _summary(recorded: RecordedRollout) -> dict[str, Any]:
    """Numbers about the token streams, so that a table of rollouts need not read these."""
    rollout = recorded.rollout
    known = [value for value in recorded.advantages or () if value is not None]
    return {
        "length": len(rollout.tokens),
        "last_turn": rollout.turns[-1] if rollout.turns else 0,
        "version": next((v for v in reversed(rollout.versions) if v is not None), None),
        # Not `fsum`, which raises where a sum of finite numbers has no finite value.
        "mean_advantage": sum(known) / len(known) if known else None,
        "tool_names": list(dict.fromkeys(map(_storable, (c.name for c in rollout.calls)))),
    }


def _streams(tokens: Rollout | Branch, advantages: Advantages | None) -> dict[str, Any]:
    return {
        "tokens": tokens.tokens,
        "sources": tokens.sources,
        "turns": tokens.turns,
        "logps": tokens.logps,
        "versions": tokens.versions,
        "kept_mass": tokens.kept_mass or None,
        "routes": None if tokens.routes is None else tokens.routes.to_bytes(),
        "advantage": advantages,
    }


def _record(row: dict[str, Any]) -> RecordedRollout:
    """A record from a row; columns of later versions may be missing."""
    last = _branch(row)
    before: list[dict[str, Any]] = row.get("earlier") or []
    rollout = Rollout(
        group=GroupId(step=row["step"], draw=row["draw"], uid=row["uid"]),
        sample=row["sample"],
        tokens=last.tokens,
        sources=last.sources,
        turns=last.turns,
        logps=last.logps,
        versions=last.versions,
        kept_mass=last.kept_mass,
        routes=last.routes,
        stop=StopReason(row["stop"]),
        text=row["text"],
        score=None if row["score"] is None else score_of(json.loads(row["score"])),
        fault=row["fault"],
        calls=tuple(call_of(tree) for tree in json.loads(row.get("calls") or "[]")),
        messages=tuple(json.loads(row.get("messages") or "[]")),
        earlier=tuple(_branch(branch) for branch in before),
        given=tuple((one["turn"], one["value"]) for one in row.get("given") or ()),
        notes=dict(row.get("notes") or ()),
    )
    baseline = row.get("baseline")
    logps = row.get("trainer_logps")
    trainer_logps = None if logps is None else tuple(logps)
    if row["advantage"] is None:
        return RecordedRollout(rollout=rollout, baseline=baseline, trainer_logps=trainer_logps)
    found = RecordedRollout(
        rollout=rollout,
        advantages=tuple(row["advantage"]),
        earlier=tuple(tuple(branch["advantage"]) for branch in before),
        baseline=baseline,
        trainer_logps=trainer_logps,
    )
    return replace(found, trainer_logps=_as_sampled(found)) if trainer_logps == () else found


def _branch(row: dict[str, Any]) -> Branch:
    routes = row.get("routes")
    return Branch(
        tokens=tuple(row["tokens"]),
        sources=tuple(Source(source) for source in row["sources"]),
        turns=tuple(row["turns"]),
        logps=tuple(row["logps"]),
        versions=tuple(row["versions"]),
        kept_mass=tuple(row.get("kept_mass") or ()),
        routes=None if routes is None else ExpertRoutes.from_bytes(routes),
    )


def _json(value: Any) -> str:
    """JSON that is valid UTF-8 and that Python reads back unchanged.

    Text with a lone surrogate, which a policy may write as an escape, stays escaped. Values that
    are not JSON are stored as their `repr`.
    """
    text = _PLAIN.encode(value)
    return _ESCAPED.encode(value) if _SURROGATE.search(text) else text
