"""Artifacts: inputs and outputs of runs, identified by content hash, listed in `artifacts.jsonl`.

An artifact is one file or one folder. Its hash depends on its content only, not on name or path, so
the hashes of its parents give its lineage.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Literal, final

from luyen.base.errors import UserError
from luyen.base.files import (
    TEMPORARY,
    append,
    json_line,
    open_lines,
    read_entries,
    read_lines,
    write_whole,
    writing,
)
from luyen.base.input_files import require_file
from luyen.base.system import lock, unlock

Kind = Literal["dataset", "model", "reward_model", "checkpoint", "export"]
MISSING = "missing"
"""The hash of an artifact that does not exist."""
NOTE = "luyen_artifact.jsonl"
"""File inside an export that holds its own record; it does not count towards the hash."""
_THREADS = 8
"""Files that are hashed concurrently: hashlib releases the GIL."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One input or output of a run.

    Example:
        >>> rows = Artifact(kind="dataset", name="rows.jsonl", hash="sha256:ab12cd34ef",
        ...                 path="/data/rows.jsonl", run="20260101-000000-abcdef")
        >>> rows.title
        'rows.jsonl@ab12cd34'
    """

    kind: Kind
    """What it is: rows, weights to begin from, a reward model, a checkpoint, an exported model."""
    name: str
    """Display name; not unique."""
    hash: str
    """Of its content: `sha256:` of files, `rows:` of rows that are made or fetched, `revision:` of
    a model of the hub, `missing` where there was nothing to hash."""
    path: str
    """Its path; the address of an artifact without files."""
    run: str
    """The run that produced it; for an artifact that no run produced, the run that read it."""
    parents: tuple[str, ...] = ()
    """Hashes of the artifacts it was made from."""
    made: str = ""
    """Time at which it was recorded."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of each file by its name below `path`; empty for an artifact without files."""
    used_as: str | None = None
    """The config key under which the run read it; None for an output."""
    is_retired: bool = False
    """Whether the run removed it on purpose."""

    @property
    def title(self) -> str:
        """`NAME@HASH` with a short hash: what follows `artifact:` in a config value."""
        return f"{self.name}@{short(self.hash)}"

    @property
    def is_whole(self) -> bool:
        """Whether `files` lists every file below `path`, so that an added file is a difference.

        For checkpoints, and for models that no run produced, only the files that are read count.
        """
        is_made = self.kind == "export" or (self.kind == "reward_model" and bool(self.parents))
        return is_made or self.kind == "dataset"


def short(content: str) -> str:
    """The first eight characters of a hash, without its kind.

    Example:
        >>> short("sha256:0123456789abcdef")
        '01234567'
    """
    return content.rpartition(":")[2][:8]


def now() -> str:
    """The current UTC time as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def hash_files(path: Path, names: Sequence[str] | None = None) -> dict[str, str]:
    """SHA-256 of a file, or of every file below a folder, by name; temporary files are left out.

    `names` restricts the files of a folder. An OSError when one of them cannot be read.
    """
    if path.is_file():
        return {path.name: _sha256(path)}
    if names is None:
        names = _names(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _sha256(path / name), names), strict=True))


def hash_of(files: Mapping[str, str]) -> str:
    """One hash of files by name and content; that of a file alone is its own SHA-256.

    Example:
        >>> hash_of({"rows.jsonl": "ab12"}), hash_of({})
        ('sha256:ab12', 'missing')
    """
    if not files:
        return MISSING
    if len(files) == 1:
        return f"sha256:{next(iter(files.values()))}"
    return f"sha256:{hashlib.sha256(json_line(dict(files)).encode()).hexdigest()}"


def difference(artifact: Artifact) -> str | None:
    """The first difference between the content now and the recorded hashes; None: they are equal.

    Every file is read. An artifact without files (generated rows, hub models) is not checked.
    """
    place = Path(artifact.path)
    for name, expected in artifact.files.items():
        file = place / name if place.is_dir() else place
        try:
            found = _sha256(file)
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read: {error.strerror or error}"
        if found != expected:
            return f"{file} has other content (sha256 {found[:8]} instead of {expected[:8]})"
    if artifact.is_whole and artifact.files and place.is_dir():
        added = [name for name in _names(place) if name not in artifact.files]
        return f"{place / added[0]} was added" if added else None
    return None


def require_unchanged(artifact: Artifact, key: str) -> None:
    """A UserError about `key` when the content differs from the recorded hashes."""
    why = difference(artifact)
    if why is not None:
        fix = "restore it from a copy, or make it again and name the new one; a change that is "
        fix += f"meant belongs in a copy elsewhere, without {NOTE}"
        raise UserError(key, artifact.title, f"it is not as it was noted: {why}", fix)


def _names(folder: Path) -> list[str]:
    """Every file below a folder except temporary files and the note of the folder itself."""
    found = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    whole = [p for p in found if not any(part.startswith(TEMPORARY) for part in p.parts)]
    return [p.as_posix() for p in whole if p.as_posix() != NOTE]


def _sha256(file: Path) -> str:
    with require_file(file).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# `artifacts.jsonl`: one line for each input and output of a run, append-only.
#
# Each line holds the checksum of the line before it, so a removed, added or moved line is detected.
# Appending reads only the end of the file: its cost does not depend on the length of the list.
#
# The same file at the top of all runs is an index of theirs, and can be rebuilt from them.

NAME = "artifacts.jsonl"
SCHEMA = 2
_UNCHAINED = 1
"""The schema whose lines do not hold the checksum of the line before."""
_CHECKSUM = "seal"
_PREVIOUS = "previous"
_BLOCK = 1 << 16
"""Bytes that are read from the end to find the last line; doubled until the line fits."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def read_artifacts(file: Path) -> list[Artifact]:
    """The entries of a file in order; empty if the file does not exist.

    A torn last line is left out. A UserError names a line whose checksum does not match; `damage`
    also detects missing lines.
    """
    if not file.is_file():
        return []
    return [_artifact(file, number, line) for number, line in enumerate(read_lines(file), 1)]


def read_intact_artifacts(file: Path) -> tuple[list[Artifact], list[str]]:
    """The entries of the lines that are as they were written, and what is wrong with the rest.

    For commands that show many lists: a damaged line does not hide the rest.
    """
    if not file.is_file():
        return [], []
    found: list[Artifact] = []
    wrong: list[str] = []
    try:
        entries = read_entries(file)
    except UserError as error:
        return [], [f"{file}: {error.why}"]
    for number, line in enumerate(entries, 1):
        try:
            found.append(_artifact(file, number, line or {}))
        except UserError as error:
            wrong.append(f"{file}: {error.why}")
    return found, wrong


def add_artifacts(file: Path, artifacts: Sequence[Artifact]) -> None:
    """Append a line for each artifact in one write; safe for concurrent processes.

    A UserError where the last line is damaged.
    """
    if not artifacts:
        return
    with writing(file), _locked(file) as handle:
        previous = _last_checksum(file, handle)
        append(handle, _lines(artifacts, file.parent, previous).encode())
        os.fsync(handle.fileno())


def rewrite_artifacts(file: Path, artifacts: Callable[[], Sequence[Artifact]]) -> int:
    """Replace all lines of the file; returns their number.

    `artifacts` is called while the file is locked, so that no process can append in between.
    """
    with writing(file), _locked(file):
        made = artifacts()
        write_whole(file, _lines(made, file.parent, ""))
    return len(made)


def not_noted(file: Path, artifacts: Iterable[Artifact]) -> list[Artifact]:
    """The artifacts that the file does not list yet; reads the whole file."""
    known = {_identity(one) for one in current(read_artifacts(file))}
    return [one for one in artifacts if _identity(one) not in known]


def damage(file: Path) -> str | None:
    """What is wrong with a list: a changed line, or a break in the checksum chain; else None."""
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
        previous = str(line[_CHECKSUM])
    return None


@contextmanager
def _locked(file: Path) -> Generator[FileIO]:
    """The file, locked and open for appending; created if it does not exist.

    The file may be replaced while we wait for the lock; then the new file is locked instead.
    """
    while True:
        with open_lines(file) as handle:
            _or_without_locks(lambda: lock(handle.fileno(), waits=True))
            try:
                if _is_at(handle, file):
                    yield handle
                    return
            finally:
                # Closing is not enough: a child forked in between shares the lock.
                _or_without_locks(lambda: unlock(handle.fileno()))


def _or_without_locks(act: Callable[[], None]) -> None:
    """Lock or unlock; a no-op on systems and file systems without locks."""
    try:
        act()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(handle: FileIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), file.stat())
    except FileNotFoundError:
        return False


def _last_checksum(file: Path, handle: FileIO) -> str:
    """The checksum of the last line, "" for an empty file; a torn last line is truncated."""
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
    return _checksum_in(file, whole[before + 1 :]) if whole else ""


def _checksum_in(file: Path, line: bytes) -> str:
    try:
        found: Any = json.loads(line)
        return str(found[_CHECKSUM])
    except (ValueError, TypeError, KeyError) as error:
        why = "its last line is damaged"
        raise UserError("file", str(file), why, "restore it from a copy, or rebuild it") from error


def current(artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Latest entry for each path or key of a run, in the order of the first entries."""
    latest = {(one.run, one.path if one.used_as is None else one.used_as): one for one in artifacts}
    return list(latest.values())


def _identity(one: Artifact) -> tuple[Any, ...]:
    """Everything that identifies an entry; time and file hashes do not."""
    same = replace(one, made="", files={})
    return (same.kind, same.name, same.hash, same.path, same.run, same.used_as, same.is_retired)


def _lines(artifacts: Iterable[Artifact], folder: Path, previous: str) -> str:
    """A line for each; the first continues the chain from the checksum `previous`."""
    lines: list[str] = []
    for one in artifacts:
        page = {**_page(one, folder), _PREVIOUS: previous}
        previous = _checksum(page)
        lines.append(json_line({**page, _CHECKSUM: previous}))
    return "".join(lines)


def _page(one: Artifact, folder: Path) -> dict[str, Any]:
    """Paths below `folder` are stored relative to it, so that it can be moved."""
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
    content = {name: value for name, value in line.items() if name != _CHECKSUM}
    if line.get(_CHECKSUM) != _checksum(content) or line.get("schema") not in (SCHEMA, _UNCHAINED):
        why = f"line {number} is not as it was written"
        raise UserError("file", str(file), why, "restore it from a copy, or remove the line")
    page = {name: value for name, value in content.items() if name not in ("schema", _PREVIOUS)}
    try:
        if page["files"]:
            page["path"] = str(file.parent.resolve() / page["path"])
        return Artifact(**{**page, "parents": tuple(page["parents"])})
    except (KeyError, TypeError) as error:
        why = f"line {number} is no artifact: {error}"
        raise UserError("file", str(file), why, "remove the line") from error


def _checksum(page: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_line(page).encode()).hexdigest()[:16]
