"""`artifacts.jsonl`: what a run read and made, a line each; lines are only ever added.

The same file at the top of all runs is an index of theirs, and can be made again from them.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.files import append, json_line, read_lines, write_whole, writing
from luyen.telemetry.artifacts import Artifact

NAME = "artifacts.jsonl"
SCHEMA = 1
_SEAL = "seal"


def read_artifacts(file: Path) -> list[Artifact]:
    """The lines of a file in order; nothing where there is none.

    A torn last line is left out. A UserError names a line that is not as it was written.
    """
    if not file.is_file():
        return []
    return [_artifact(file, number, line) for number, line in enumerate(read_lines(file), 1)]


def add_artifacts(file: Path, artifacts: Iterable[Artifact]) -> None:
    """Add those that do not hold yet, a line each; several processes may do so at once."""
    with writing(file), file.open("ab", buffering=0) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _drop_torn_end(file, handle)
        known = {_identity(one) for one in current(read_artifacts(file))}
        for one in artifacts:
            if _identity(one) not in known:
                append(handle, _line(one, file.parent).encode())
        os.fsync(handle.fileno())


def rewrite_artifacts(file: Path, artifacts: Sequence[Artifact]) -> None:
    """Put these lines in the place of the file."""
    write_whole(file, "".join(_line(one, file.parent) for one in artifacts))


def current(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """What holds now: of lines about the same place or the same key of a run, the last.

    They stand in the order in which place or key was first noted.
    """
    held = {(one.run, one.path if one.used_as is None else one.used_as): one for one in artifacts}
    return list(held.values())


def _drop_torn_end(file: Path, handle: FileIO) -> None:
    """Cut off a line that a loss of power left without its end."""
    written = file.read_bytes()
    whole = written.rfind(b"\n") + 1
    if whole < len(written):
        handle.truncate(whole)


def _identity(one: Artifact) -> tuple[Any, ...]:
    """The artifact without the time: noted twice, it is the same."""
    same = replace(one, made="", files={})
    return (same.kind, same.name, same.hash, same.path, same.run, same.used_as, same.is_retired)


def _line(one: Artifact, folder: Path) -> str:
    """Files below the folder are written from there, so that it may be moved whole."""
    home = folder.resolve()
    is_inside = bool(one.files) and Path(one.path).is_relative_to(home)
    page = {
        "schema": SCHEMA,
        "kind": one.kind,
        "name": one.name,
        "hash": one.hash,
        "path": str(Path(one.path).relative_to(home)) if is_inside else one.path,
        "run": one.run,
        "parents": list(one.parents),
        "made": one.made,
        "files": dict(one.files),
        "used_as": one.used_as,
        "is_retired": one.is_retired,
    }
    return json_line({**page, _SEAL: _seal(page)})


def _artifact(file: Path, number: int, line: dict[str, Any]) -> Artifact:
    page = {name: value for name, value in line.items() if name not in (_SEAL, "schema")}
    is_sound = line.get(_SEAL) == _seal({**page, "schema": line.get("schema")})
    if not is_sound or line.get("schema") != SCHEMA:
        why = f"line {number} is not as it was written"
        raise UserError("file", str(file), why, "restore it from a copy, or remove the line")
    if page["files"]:
        page["path"] = str(file.parent.resolve() / page["path"])
    return Artifact(**{**page, "parents": tuple(page["parents"])})


def _seal(page: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_line(page).encode()).hexdigest()[:16]
