"""Artifacts: what runs read and make, known by content.

An artifact is one file or one folder. Its hash is that of its content, whatever it is called and
wherever it lies, so the hashes of its parents say what it was made from.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, final

from luyen.base.errors import UserError
from luyen.base.files import json_line
from luyen.base.leftovers import TEMPORARY
from luyen.base.reading import require_file

Kind = Literal["dataset", "model", "reward_model", "checkpoint", "export"]
MISSING = "missing"
"""The hash of what is not there."""
NOTE = "luyen_artifact.jsonl"
"""What an export says of itself, in its own folder: no part of its content."""
_THREADS = 8
"""Files that are hashed at once: hashing leaves the interpreter to others."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One thing that a run read or made.

    Example:
        >>> rows = Artifact(kind="dataset", name="rows.jsonl", hash="sha256:ab12cd34ef",
        ...                 path="/data/rows.jsonl", run="20260101-000000-abcdef")
        >>> rows.title
        'rows.jsonl@ab12cd34'
    """

    kind: Kind
    """What it is: rows, weights to begin from, a reward model, a checkpoint, an exported model."""
    name: str
    """How people call it; many may have the same name."""
    hash: str
    """Of its content: `sha256:` of files, `rows:` of rows that are made or fetched, `revision:` of
    a model of the hub, `missing` where there was nothing to hash."""
    path: str
    """Where it lies; for what has no files, its address."""
    run: str
    """The run that made it, or, for what no run made, the run that read it."""
    parents: tuple[str, ...] = ()
    """Hashes of what it was made from."""
    made: str = ""
    """When it was noted."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of each file by its name below `path`; empty for what has no files."""
    used_as: str | None = None
    """The key under which the run read it; None for what the run made."""
    is_retired: bool = False
    """Whether the run took it away on purpose."""

    @property
    def title(self) -> str:
        """Name and the beginning of the hash: what stands after `artifact:`."""
        return f"{self.name}@{short(self.hash)}"

    @property
    def is_whole(self) -> bool:
        """Whether `files` are all that lie below `path`: one more is a difference.

        Of a checkpoint and of a model that no run made, only those count that are read.
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
    """The time, as it is noted."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def hash_files(path: Path, names: Sequence[str] | None = None) -> dict[str, str]:
    """SHA-256 of a file, or of every file below a folder, by name; what is unfinished is left out.

    `names` are the files that count, where not all of a folder do. An OSError when one of them
    cannot be read.
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
    """How the content now differs from what was noted, by the first file; None: it is the same.

    Every file is read. What has no files (rows that are made, models of the hub) is believed.
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
    """A UserError, about the key that names it, when the content is not what was noted."""
    why = difference(artifact)
    if why is not None:
        fix = "restore it from a copy, or make it again and name the new one; a change that is "
        fix += f"meant belongs in a copy elsewhere, without {NOTE}"
        raise UserError(key, artifact.title, f"it is not as it was noted: {why}", fix)


def _names(folder: Path) -> list[str]:
    """Every file below a folder, but what is unfinished and the note of the folder itself."""
    found = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    whole = [p for p in found if not any(part.startswith(TEMPORARY) for part in p.parts)]
    return [p.as_posix() for p in whole if p.as_posix() != NOTE]


def _sha256(file: Path) -> str:
    with require_file(file).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
