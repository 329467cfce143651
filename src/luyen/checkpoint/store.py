"""A folder of checkpoints, each whole or absent; the newest and the best of them stay.

A checkpoint is written to a temporary folder, every file is hashed into its manifest and synced to
the disk, and the folder is renamed. Whatever kills the writer, a folder named `step_N` is complete;
what happens to its files afterwards is found by the hashes when it is loaded.
"""

import hashlib
import math
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, final

from luyen.base.errors import UserError
from luyen.base.files import (
    in_progress,
    is_abandoned,
    json_page,
    read_json,
    sync,
    temporary_path,
    writing,
)
from luyen.base.rundir import step_name, step_of

# Retention: the newest checkpoints stay, and the best by a metric.

METRICS = "metrics"
"""The fact of a checkpoint that holds the last known value of each metric."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BestMetric:
    """How many of the best stay, and what makes one better.

    Example:
        >>> BestMetric(count=1, metric="val/accuracy", mode="max").count
        1
    """

    count: int
    """How many stay."""
    metric: str
    """Name of the metric that is compared."""
    mode: Literal["max", "min"]
    """Which end of it is better."""


def to_retire(
    facts: Mapping[int, Mapping[str, Any]], *, keep: int, best: BestMetric | None
) -> tuple[int, ...]:
    """Steps whose checkpoints are removed, by the facts of each; of equals the newer is better.

    Example:
        >>> facts = {step: {"metrics": {"loss": loss}} for step, loss in enumerate([3, 1, 2, 4])}
        >>> to_retire(facts, keep=1, best=BestMetric(count=1, metric="loss", mode="min"))
        (0, 2)
    """
    steps = sorted(facts)
    stay = set(steps[-keep:])
    if best is not None and best.count:
        sign = 1.0 if best.mode == "max" else -1.0
        known = {step: value_of(facts[step], best.metric) for step in steps}
        ranked = [(sign * value, step) for step, value in known.items() if value is not None]
        stay |= {step for _, step in sorted(ranked)[-best.count :]}
    return tuple(step for step in steps if step not in stay)


def value_of(facts: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a checkpoint; None when it was not known, or is no number one can compare."""
    found = facts.get(METRICS, {}).get(metric)
    value = float(found) if isinstance(found, float | int | str) else math.nan
    return value if math.isfinite(value) else None


# Notifications about checkpoints that are added or removed.


class CheckpointListener(Protocol):
    """Called by the writer of checkpoints when one is added or removed."""

    def kept(self, path: Path, going: Sequence[Path] = ()) -> None:
        """This one is whole and in its place; those are about to be taken away for it."""
        ...

    def going(self, path: Path) -> None:
        """This one is about to be taken away from its place."""
        ...


@final
class NoListener:
    """Does not listen."""

    def kept(self, path: Path, going: Sequence[Path] = ()) -> None:
        """Nothing is done."""

    def going(self, path: Path) -> None:
        """Nothing is done."""


NO_LISTENER = NoListener()


SCHEMA = 2
"""Version of the layout of a checkpoint; a reader refuses a later one."""
MANIFEST = "manifest.json"
_REPLACED = "replaced-"


class DamagedCheckpoint(UserWarning):
    """A checkpoint could not be used, and an earlier one takes its place."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint whose files were verified.

    Example:
        >>> Checkpoint(step=7, path=Path("checkpoints/step_000007"), facts={}).path.name
        'step_000007'
    """

    step: int
    """Steps that were finished when it was made."""
    path: Path
    """Folder with its files."""
    facts: Mapping[str, Any]
    """Metadata saved with it: metrics, versions, anything plain."""


@final
class CheckpointStore:
    """The checkpoints of one run.

    Making the object touches nothing, so that tools may look at a run that is going on.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep: int | None = None,
        best: BestMetric | None = None,
        watcher: CheckpointListener = NO_LISTENER,
    ) -> None:
        """`keep` is how many of the newest stay after a save; None keeps all.

        Those that are best by a metric stay besides them.
        """
        assert keep is None or keep >= 1, f"keep {keep}: the newest one always stays"
        self.directory = Path(directory)
        self.keep = keep
        self.best = best
        self.watcher = watcher

    def list(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return ()
        found = {_step(path.name) for path in self.directory.iterdir() if path.is_dir()}
        return tuple(sorted(step for step in found if step is not None))

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None when there is none."""
        steps = self.list()
        return steps[-1] if steps else None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        place = self.directory / step_name(step)
        # A save over an existing checkpoint moves that one aside first; killed in between, it
        # leaves the old one under this name, and the old one it is.
        aside = self.directory / f"{_REPLACED}{step_name(step)}"
        return aside if aside.is_dir() and not place.is_dir() else place

    def save(
        self, step: int, writer: Callable[[Path], None], *, facts: Mapping[str, Any] | None = None
    ) -> Path:
        """Make the checkpoint of a step: `writer` fills an empty folder, which then appears whole.

        When the writer fails, or the disk does, nothing appears and earlier checkpoints stay.
        """
        unfinished = self.begin(step)
        with unfinished.filling():
            writer(unfinished.folder)
        return unfinished.finish(facts or {})

    def begin(self, step: int) -> "Unfinished":
        """An empty folder for the checkpoint of a step, to be finished or abandoned."""
        place = self.directory / step_name(step)
        folder = temporary_path(place)
        with ExitStack() as claimed, writing(place, field="checkpoint"):
            claimed.enter_context(in_progress(folder))
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder.mkdir()
            kept = claimed.pop_all()
        return Unfinished(self, step, folder, kept)

    def take(self, unfinished: Path, step: int, facts: Mapping[str, Any]) -> Path:
        """Write the manifest of a complete folder, and rename it to its final name."""
        place = self.directory / step_name(step)
        _write_manifest(unfinished, step, facts)
        self._put(unfinished, place)
        self._retire(place)
        return place

    def _retire(self, newest: Path) -> None:
        """Note the newest checkpoint; all but the newest `keep` and the best are removed."""
        facts = {} if self.keep is None else {n: _facts(self.path(n)) for n in self.list()}
        going = () if self.keep is None else to_retire(facts, keep=self.keep, best=self.best)
        old = [self.path(step) for step in going]
        self.watcher.kept(newest, going=old)
        for folder in old:
            _remove(folder)

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step, every file compared with its hash; a UserError when torn."""
        if step not in self.list():
            known = ", ".join(map(str, self.list())) or "none"
            why = f"there is no checkpoint of that step (there are: {known})"
            raise UserError("checkpoint", step, why, "choose one of them")
        return verify(self.path(step))

    def newest_sound(self) -> Checkpoint | None:
        """The newest checkpoint that can be loaded, with a warning for each that cannot."""
        for step in reversed(self.list()):
            try:
                return self.load(step)
            except UserError as error:
                warnings.warn(f"{error}; trying an earlier one", DamagedCheckpoint, stacklevel=2)
        return None

    def _put(self, unfinished: Path, place: Path) -> None:
        """Rename the finished folder onto its place, keeping what was there until it is done."""
        aside = place.with_name(f"{_REPLACED}{place.name}")
        if place.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            place.rename(aside)
        unfinished.rename(place)
        sync(self.directory)
        _remove(aside)

    def part_with(self, step: int) -> None:
        """Say that the checkpoint of a step is about to be taken away from its place."""
        self.watcher.going(self.path(step))

    def _sweep(self) -> None:
        """Remove what killed writers left: unfinished folders, and replaced ones not needed."""
        for path in self.directory.iterdir():
            replaced = path.name.removeprefix(_REPLACED)
            done = replaced != path.name and (self.directory / replaced).is_dir()
            if done or is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


@final
class Unfinished:
    """A checkpoint being written: a temporary folder, until it is finished or abandoned."""

    def __init__(self, store: CheckpointStore, step: int, folder: Path, claim: ExitStack) -> None:
        self.folder = folder
        self._store = store
        self._step = step
        self._claim = claim
        """While it is open, no other process removes the folder as abandoned."""

    @contextmanager
    def filling(self) -> Generator[None]:
        """Write into the folder inside; whatever goes wrong there abandons it."""
        place = self._store.path(self._step)
        with ExitStack() as failed, writing(place, field="checkpoint"):
            failed.callback(self.abandon)
            yield
            failed.pop_all()

    def finish(self, facts: Mapping[str, Any]) -> Path:
        """Let the checkpoint appear whole; where that fails nothing appears."""
        with self.filling():
            place = self._store.take(self.folder, self._step, facts)
        self._claim.close()
        return place

    def abandon(self) -> None:
        """Remove what was written. Abandoning twice is allowed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()


def verify(path: Path) -> Checkpoint:
    """The checkpoint in a folder; a UserError names the file that is not as it was written."""
    if not path.is_dir():
        raise UserError(
            "checkpoint", str(path), "no such folder", "give the folder of a checkpoint"
        )
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        _demand(path / name, expected)
    return Checkpoint(step=manifest["step"], path=path, facts=manifest["facts"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; a UserError when it is not as it was written.

    The files that it lists are not looked at.
    """
    manifest = read_json(path / MANIFEST)
    schema = manifest.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        why = f"its files follow layout {schema!r}, and this version reads up to {SCHEMA}"
        raise UserError("checkpoint", str(path / MANIFEST), why, "install a newer luyen")
    body = {name: value for name, value in manifest.items() if name != "seal"}
    if manifest.get("seal") != _manifest_checksum(body):
        raise _torn(path / MANIFEST, "it is not as it was written")
    if (fault := manifest_fault(body, folder_step=step_of(path.name))) is not None:
        raise _torn(path / MANIFEST, fault)
    return manifest


def _demand(file: Path, expected: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise _torn(file, "it is missing")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise _torn(file, f"it has {size} bytes and was written with {expected['bytes']}")
    if _sha256(file) != expected["sha256"]:
        raise _torn(file, "its content is not what was written (sha256 differs)")


def _torn(file: Path, why: str) -> UserError:
    return UserError("checkpoint file", str(file), why, "resume from an earlier checkpoint")


def _write_manifest(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Force every file to the disk, and write the manifest with their hashes."""
    files: dict[str, dict[str, Any]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync(file)
        name = file.relative_to(folder).as_posix()
        files[name] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
    body = {"schema": SCHEMA, "step": step, "facts": dict(facts), "files": files}
    page = json_page({**body, "seal": _manifest_checksum(body)})
    (folder / MANIFEST).write_text(page, encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync(inner)


def _manifest_checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_page(dict(sorted(body.items()))).encode()).hexdigest()


def _facts(folder: Path) -> Mapping[str, Any]:
    """The metadata of a checkpoint; empty if its manifest is damaged."""
    try:
        found = read_json(folder / MANIFEST).get("facts")
    except UserError:
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    """Take a folder out of sight before its files go, so that no half of it is ever seen."""
    if folder.is_dir():
        doomed = temporary_path(folder)
        folder.rename(doomed)
        sync(folder.parent)
        shutil.rmtree(doomed, ignore_errors=True)


def _step(name: str) -> int | None:
    return step_of(name.removeprefix(_REPLACED))


def manifest_fault(manifest: Mapping[str, Any], *, folder_step: int | None) -> str | None:
    """What is wrong with the parts of a manifest; None: nothing.

    A valid checksum does not prove that this package wrote it.

    Example:
        >>> manifest_fault({"step": 1, "files": {}, "facts": []}, folder_step=1)
        '`facts` is no object'
    """
    step, files, facts = (manifest.get(name) for name in ("step", "files", "facts"))
    if not isinstance(step, int) or step < 0:
        return "`step` is no whole number from 0 on"
    if folder_step not in (None, step):
        return f"it is that of step {step}"
    if not isinstance(files, dict) or not all(_is_file(one) for one in files.values()):
        return "`files` does not hold size and SHA-256 of each file"
    if not isinstance(facts, dict):
        return "`facts` is no object"
    metrics = facts.get("metrics", {})
    if not isinstance(metrics, dict) or not all(_is_number(one) for one in metrics.values()):
        return "`facts.metrics` does not hold numbers"
    if not isinstance(facts.get("chain", ""), str | None):
        return "`facts.chain` is no hash"
    return None


def _is_file(value: object) -> bool:
    return isinstance(value, dict) and {"bytes", "sha256"} <= value.keys()


def _is_number(value: object) -> bool:
    # What is not finite is written as text.
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf", None)
