"""All artifacts of the runs below a folder: found by name or hash, verified, traced to their roots.

The lists in the run directories are authoritative. The index at the top avoids a scan, keeps the
entries of removed runs, and can be rebuilt from the lists with `rebuild`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.rundir import RunDirectory
from luyen.telemetry.artifacts import (
    NAME,
    NOTE,
    Artifact,
    add_artifacts,
    current,
    damage,
    read_artifacts,
    read_intact_artifacts,
    rewrite_artifacts,
)

_DEEPEST = 4
"""Folders between the top and a run: project and experiment, either of which may hold a slash."""
_HASH = re.compile(r"(?:\w+:)?([0-9a-f]{6,64})")


def run_directories(root: Path, *, deepest: int = _DEEPEST) -> Iterator[RunDirectory]:
    """The runs below a folder, by name; the folder itself where it is one. Runs hold no runs.

    Folders below that this user may not look into are left out: one would hide all the rest.
    """
    try:
        is_run = RunDirectory(root).exists
    except UserError:
        if deepest == _DEEPEST:
            raise
        return
    if is_run:
        yield RunDirectory(root)
        return
    if deepest == 0:
        return
    try:
        below = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return
    for path in below:
        yield from run_directories(Path(path), deepest=deepest - 1)


@final
class ArtifactRegistry:
    """Snapshot of the artifacts recorded below one folder.

    Example:
        >>> ArtifactRegistry(Path("/nowhere")).artifacts
        ()
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        runs, skipped = _noted_below(root)
        self.skipped = tuple(skipped)
        """What is wrong with each line of a run's list that was left out."""
        here = {one.run for one in runs}
        # The list of a present run wins; the index only adds runs that were removed.
        gone = [one for one in _index(root) if one.run not in here]
        self.artifacts = (*current(gone), *runs)

    def find(self, words: str) -> list[Artifact]:
        """Artifacts that match a name, `NAME@HASH` or a hash; a prefix of the hash is enough.

        Outputs of runs come before inputs, and each path is listed once.
        """
        name, at, content = words.rpartition("@")
        whole = name if at else words
        wanted = _HASH.fullmatch(content if at else words)
        found = [
            one
            for one in self.artifacts
            if (one.name == whole and (not at or _begins(one, wanted)))
            or (not at and _begins(one, wanted))
        ]
        unique = {(one.hash, one.path): one for one in sorted(found, key=_is_read, reverse=True)}
        return sorted(unique.values(), key=_is_read)

    def one(self, words: str, key: str) -> Artifact:
        """The one artifact that matches; a UserError about `key` when none or several do."""
        if self.skipped:  # the line that is left out may be the one that is meant
            why, fix = self.skipped[0], "restore the file from a copy, or remove the line"
            raise UserError(key, f"artifact:{words}", why, fix)
        found = [one for one in self.find(words) if not one.is_retired]
        hashes = {one.hash for one in found}
        if len(hashes) == 1:
            return found[0]
        if hashes:
            why = f"{len(hashes)} artifacts are meant by it"
            titles = ", ".join(sorted({one.title for one in found}))
            raise UserError(key, f"artifact:{words}", why, f"give one of {titles}")
        titles = sorted({one.title for one in self.artifacts if not one.is_retired})
        why = f"no run below {self.root} has noted it"
        hint = did_you_mean(words, titles)
        raise UserError(key, f"artifact:{words}", why, hint or "`luyen artifacts` lists them")

    def maker(self, content: str) -> Artifact | None:
        """The artifact with this content hash; the record of the producing run is preferred."""
        found = [one for one in self.artifacts if one.hash == content]
        return min(found, key=_is_read, default=None)

    def rebuild(self) -> int:
        """Rewrite the index from the run directories; returns its number of lines."""
        return rewrite_artifacts(self.root / NAME, lambda: _noted_below(self.root)[0])

    def damage(self) -> dict[str, str]:
        """File -> what is wrong with it, for the lists of all runs and the index."""
        files = [self.root / NAME, *(run.root / NAME for run in run_directories(self.root))]
        found = {str(file): damage(file) for file in dict.fromkeys(files)}
        return {file: why for file, why in found.items() if why is not None}


def made_at(path: Path) -> Artifact | None:
    """The artifact that a run produced at this path; None where no run did.

    Read from the list of the enclosing run directory, or from the note inside an export.

    Example:
        >>> made_at(Path("/nowhere/export"))
    """
    place = path.resolve()
    home = next((folder for folder in place.parents if RunDirectory(folder).exists), None)
    listed = read_artifacts(home / NAME) if home is not None else []
    found = {one.path: one for one in current(listed) if one.used_as is None}
    made = found.get(str(place)) or next(iter(read_artifacts(place / NOTE)), None)
    return None if made is None or made.is_retired else made


def note(run: RunDirectory, artifacts: list[Artifact], root: Path | None) -> None:
    """Add artifacts to a run's list, and then to the index of all runs below `root`.

    In this order, since `rebuild` derives the index from the lists. A damaged index is left as it
    is: it can be rebuilt.
    """
    add_artifacts(run.root / NAME, artifacts)
    if root is not None:
        with suppress(UserError):
            add_artifacts(root / NAME, artifacts)


def _noted_below(root: Path) -> tuple[list[Artifact], list[str]]:
    """Current entries of the lists of all runs below a folder, and damaged lines in words."""
    found: list[Artifact] = []
    skipped: list[str] = []
    for run in run_directories(root):
        intact, wrong = read_intact_artifacts(run.root / NAME)
        found += intact
        skipped += wrong
    return current(found), skipped


def _index(root: Path) -> list[Artifact]:
    try:
        return read_artifacts(root / NAME)
    except UserError:
        return []


def _begins(one: Artifact, wanted: re.Match[str] | None) -> bool:
    return wanted is not None and one.hash.rpartition(":")[2].startswith(wanted.group(1))


def _is_read(one: Artifact) -> bool:
    return one.used_as is not None
