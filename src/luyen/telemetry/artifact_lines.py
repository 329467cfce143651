"""`artifacts.jsonl`: what a run read and made, a line each; lines are only ever added.

Each line names the seal of the one before, so a line that was removed, added or moved shows. To add
one, only the end of the file is read: a note costs the same however long the list is.

The same file at the top of all runs is an index of theirs, and can be made again from them.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.files import append, json_line, read_lines, write_whole, writing
from luyen.base.owned import open_lines
from luyen.telemetry.artifacts import Artifact

NAME = "artifacts.jsonl"
SCHEMA = 2
_UNCHAINED = 1
"""The version whose lines do not name the one before."""
_SEAL = "seal"
_PREVIOUS = "previous"
_BLOCK = 1 << 16
"""Bytes that are read from the end to find the last line; twice as many where it is longer."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def read_artifacts(file: Path) -> list[Artifact]:
    """The lines of a file in order; nothing where there is none.

    A torn last line is left out. A UserError names a line that is not as it was written; whether
    lines are missing is what `damage` says.
    """
    if not file.is_file():
        return []
    return [_artifact(file, number, line) for number, line in enumerate(read_lines(file), 1)]


def add_artifacts(file: Path, artifacts: Sequence[Artifact]) -> None:
    """Add a line for each in one write; several processes may do so at once.

    A UserError where the end of the file is not as it was written.
    """
    if not artifacts:
        return
    with writing(file), _locked(file) as handle:
        previous = _last_seal(file, handle)
        append(handle, _lines(artifacts, file.parent, previous).encode())
        os.fsync(handle.fileno())


def rewrite_artifacts(file: Path, artifacts: Callable[[], Sequence[Artifact]]) -> int:
    """Put other lines in the place of the file, and say how many.

    They are asked for when nobody else can add a line any more.
    """
    with writing(file), _locked(file):
        made = artifacts()
        write_whole(file, _lines(made, file.parent, ""))
    return len(made)


def not_noted(file: Path, artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Those that the file does not say already; all of it is read."""
    known = {_identity(one) for one in current(read_artifacts(file))}
    return [one for one in artifacts if _identity(one) not in known]


def damage(file: Path) -> str | None:
    """What is wrong with a list: a changed line, or one that does not follow the one before."""
    if not file.is_file():
        return None
    try:
        read_artifacts(file)
    except UserError as error:
        return error.why
    previous = ""
    for number, line in enumerate(read_lines(file), 1):
        if line["schema"] != _UNCHAINED and line[_PREVIOUS] != previous:
            return f"line {number} does not follow the one before: a line was removed or added"
        previous = str(line[_SEAL])
    return None


@contextmanager
def _locked(file: Path) -> Generator[FileIO]:
    """The file for this process alone, open for adding to it; it is made where there is none.

    Whoever waited may have locked a file that another has been put in the place of.
    """
    while True:
        with open_lines(file) as handle:
            _flock(handle, fcntl.LOCK_EX)
            try:
                if _is_at(handle, file):
                    yield handle
                    return
            finally:
                # Closing is not enough: a child that was forked meanwhile has the same lock.
                _flock(handle, fcntl.LOCK_UN)


def _flock(handle: FileIO, what: int) -> None:
    """Lock or unlock it; a file system without locks lets everyone in."""
    try:
        fcntl.flock(handle, what)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(handle: FileIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), file.stat())
    except FileNotFoundError:
        return False


def _last_seal(file: Path, handle: FileIO) -> str:
    """The seal of the last line, "" without one; a line that power cut short is cut off."""
    size, block = os.fstat(handle.fileno()).st_size, _BLOCK
    with file.open("rb", buffering=0) as reader:
        while True:
            start = max(0, size - block)
            reader.seek(start)
            end = reader.read(size - start)
            whole = end[: end.rfind(b"\n") + 1]
            before = whole.rfind(b"\n", 0, -1)
            if start == 0 or before >= 0:
                break
            block *= 2
    if len(whole) < len(end):
        handle.truncate(start + len(whole))
    return _seal_in(file, whole[before + 1 :]) if whole else ""


def _seal_in(file: Path, line: bytes) -> str:
    try:
        found: Any = json.loads(line)
        return str(found[_SEAL])
    except (ValueError, TypeError, KeyError) as error:
        why = "its last line is damaged"
        raise UserError("file", str(file), why, "restore it from a copy, or rebuild it") from error


def current(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """What holds now: of lines about the same place or the same key of a run, the last.

    They stand in the order in which place or key was first noted.
    """
    held = {(one.run, one.path if one.used_as is None else one.used_as): one for one in artifacts}
    return list(held.values())


def _identity(one: Artifact) -> tuple[Any, ...]:
    """The artifact without the time: noted twice, it is the same."""
    same = replace(one, made="", files={})
    return (same.kind, same.name, same.hash, same.path, same.run, same.used_as, same.is_retired)


def _lines(artifacts: Iterable[Artifact], folder: Path, previous: str) -> str:
    """A line for each, the first after the one with the seal `previous`."""
    lines: list[str] = []
    for one in artifacts:
        page = {**_page(one, folder), _PREVIOUS: previous}
        previous = _seal(page)
        lines.append(json_line({**page, _SEAL: previous}))
    return "".join(lines)


def _page(one: Artifact, folder: Path) -> dict[str, Any]:
    """Files below the folder are written from there, so that it may be moved whole."""
    home = folder.resolve()
    is_inside = bool(one.files) and Path(one.path).is_relative_to(home)
    return {
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


def _artifact(file: Path, number: int, line: dict[str, Any]) -> Artifact:
    sealed = {name: value for name, value in line.items() if name != _SEAL}
    if line.get(_SEAL) != _seal(sealed) or line.get("schema") not in (SCHEMA, _UNCHAINED):
        why = f"line {number} is not as it was written"
        raise UserError("file", str(file), why, "restore it from a copy, or remove the line")
    page = {name: value for name, value in sealed.items() if name not in ("schema", _PREVIOUS)}
    if page["files"]:
        page["path"] = str(file.parent.resolve() / page["path"])
    return Artifact(**{**page, "parents": tuple(page["parents"])})


def _seal(page: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_line(page).encode()).hexdigest()[:16]
