"""The runs of a folder by id, with a row for each, reread only where its files changed.

An id is made from the path of a run below the folder and is looked up among the runs that were
found, so no request can name a path. Runs and files that are links out of the folder are not read.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, final

from luyen.base.files import is_running
from luyen.base.input_files import parse_json, read_bytes
from luyen.base.run_lock import OWNER, is_claimed
from luyen.base.rundir import RunDirectory
from luyen.studio.metrics_file import first_validation, open_records, spread_lines
from luyen.studio.runs import FixedFacts, RunFacts, facts_now, fixed_facts, shown_validation
from luyen.telemetry.artifact_registry import run_directories

_SLUG = re.compile(r"[^a-z0-9]+")
_POINTS = 64
_WATCHED = ("manifest.json", "config.yaml", "metrics.jsonl", OWNER, "notes.jsonl", "checkpoints")
_MAY_BE_LINKED = "checkpoints"
CURVES = ("reward/mean", "sft/nll", "preference/loss", "reward_model/loss", "distill/divergence")
"""The metric of the small curve: the first of these that a run has."""

_BROKEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What readers raise for content that no check knew of."""

Stamp = tuple[tuple[int, int, int] | None, ...]
Row = dict[str, Any]


@final
class Refusal(Exception):
    """A request that is not answered, with the status and what to do."""

    def __init__(
        self, status: int, message: str, *, field: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.fix = fix

    def body(self) -> dict[str, dict[str, str | None]]:
        """The reply."""
        return {"error": {"message": str(self), "field": self.field, "fix": self.fix}}


@final
class KnownRun(NamedTuple):
    """A run that was found."""

    id: str
    """Its id."""
    directory: RunDirectory
    """Its files."""
    row: Row
    """What the list shows of it."""
    problem: str | None
    """Why nothing else of it is read; None: it is."""


@final
class RunFolder:
    """The runs below a folder; safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()
        self._lock = threading.Lock()
        self._known: dict[str, KnownRun] = {}
        self._stamps: dict[str, Stamp] = {}
        self._fixed: dict[str, tuple[Stamp, FixedFacts]] = {}
        self._first = threading.Event()
        self._listeners: list[Callable[[Row], None]] = []
        self.scanned_at = 0.0
        """When the last scan ended, by the monotonic clock."""

    def scan(self) -> None:
        """Look for runs, and reread those whose files changed; listeners get changed rows."""
        # A folder that changes during a scan may break it; the next one sees it whole.
        with self._lock, suppress(OSError, RuntimeError):
            found: set[str] = set()
            for directory in self._directories():
                run_id = id_of(directory.root, self.root)
                found.add(run_id)
                stamp = _stamp(directory.root, (*_WATCHED, "."))  # itself: a new link in it
                is_live = self._known.get(run_id) and self._known[run_id].row["state"] == "running"
                if self._stamps.get(run_id) == stamp and (
                    not is_live or is_claimed(directory.root)
                ):
                    continue
                known = self._read_any(run_id, directory)
                before = self._known.get(run_id)
                self._known[run_id], self._stamps[run_id] = known, stamp
                if before is None or before.row != known.row:
                    self._tell(known.row)
            for gone in set(self._known) - found:
                row = self._known.pop(gone).row
                self._stamps.pop(gone, None)
                self._fixed.pop(gone, None)
                self._tell({**row, "removed": True})
            self.scanned_at = time.monotonic()
            self._first.set()

    def rows(self, *, wait_s: float) -> tuple[list[Row], bool]:
        """Rows, the newest run first, and whether every run was looked at.

        Waits at most some seconds for the first scan.
        """
        is_whole = self._first.wait(wait_s)
        rows = [known.row for known in list(self._known.values())]
        return sorted(rows, key=lambda row: row["started"] or "", reverse=True), is_whole

    def get(self, run_id: str, *, is_read: bool = True) -> KnownRun:
        """The run of an id; a refusal where there is none, or none that can be read."""
        known = self._known.get(run_id)
        if known is None and not self._first.is_set():
            self._first.wait(5.0)
            known = self._known.get(run_id)
        if known is None:
            raise Refusal(404, "there is no such run in the folder", field="id")
        if is_read and known.problem is not None:
            raise Refusal(409, known.problem, field="run", fix="copy the run without links")
        if not known.directory.root.is_dir():
            raise Refusal(404, "the run directory was removed", field="id")
        return known

    def find(self, directory: Path) -> str | None:
        """Id of the run in a directory; None where it was not found below the folder."""
        try:
            run_id = id_of(directory.resolve(), self.root)
        except ValueError:
            return None
        return run_id if run_id in self._known else None

    def listen(self, listener: Callable[[Row], None]) -> Callable[[], None]:
        """Call the listener with every row that changes; returns a function that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _tell(self, row: Row) -> None:
        for listener in list(self._listeners):
            listener(row)

    def _directories(self) -> Iterator[RunDirectory]:
        for directory in run_directories(self.root):
            place = directory.root.resolve()
            if place == self.root or self.root in place.parents:
                yield directory

    def _read_any(self, run_id: str, directory: RunDirectory) -> KnownRun:
        """The run; one that breaks its readers is shown as damaged, and the rest as it is."""
        try:
            return self._read(run_id, directory)
        except _BROKEN as error:
            problem = f"it cannot be read: {type(error).__name__}: {error}"[:300]
            row = _row(run_id, directory, FixedFacts(run="?", damage=problem), self.root)
            return KnownRun(run_id, directory, row, problem)

    def _read(self, run_id: str, directory: RunDirectory) -> KnownRun:
        problem = outward_link(directory.root, self.root)
        if problem is not None:
            damaged = FixedFacts(run="?", damage=problem)
            row = _row(run_id, directory, damaged, self.root)
            return KnownRun(run_id, directory, row, problem)
        row = _row(run_id, directory, self._facts(run_id, directory), self.root)
        return KnownRun(run_id, directory, row, None)

    def _facts(self, run_id: str, directory: RunDirectory) -> FixedFacts:
        stamp = _stamp(directory.root, ("manifest.json", "config.yaml"))
        cached = self._fixed.get(run_id)
        if cached is None or cached[0] != stamp:
            cached = stamp, fixed_facts(directory)
            self._fixed[run_id] = cached
        return cached[1]


def token_file(folder: Path, known: KnownRun, step: int) -> Path:
    """Where a replay that the studio started writes the numbers of the tokens of a step."""
    return folder / ".studio" / "tokens" / known.id / f"step_{step:06d}.parquet"


def id_of(path: Path, root: Path) -> str:
    """The id of a run.

    Example:
        >>> id_of(Path("/runs/a/My Run"), Path("/runs"))
        'my-run-d769a743'
    """
    inner = path.relative_to(root).as_posix()
    slug = _SLUG.sub("-", path.name.lower()).strip("-")[:40] or "run"
    return f"{slug}-{hashlib.sha256(os.fsencode(inner)).hexdigest()[:8]}"


def outward_link(run: Path, root: Path) -> str | None:
    """What is wrong where a file or folder of a run is a link out of the folder of runs."""
    try:
        entries = [entry for entry in os.scandir(run) if entry.is_symlink()]
    except OSError as error:
        return f"it cannot be listed: {error.strerror or error}"
    for entry in entries:
        place = Path(os.path.realpath(entry.path))
        if entry.name != _MAY_BE_LINKED and root not in place.parents:
            return f"`{entry.name}` is a link out of the folder of runs, which is not followed"
    return None


def _stamp(run: Path, names: tuple[str, ...]) -> Stamp:
    found: list[tuple[int, int, int] | None] = []
    for name in names:
        try:
            facts = os.stat(run / name)
        except (OSError, ValueError):
            found.append(None)
            continue
        found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _row(run_id: str, directory: RunDirectory, fixed: FixedFacts, root: Path) -> Row:
    newest = max((one[2] for one in _stamp(directory.root, _WATCHED) if one), default=0) / 1e9
    changed = datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
    facts = facts_now(directory, fixed, size=0, changed=changed)
    inner = directory.root.relative_to(root)
    first, curve, reward = _curve(directory, fixed) if fixed.damage is None else (None, [], None)
    validation = None
    if facts.metric is not None:
        validation = {"name": facts.metric, "first": first, "last": facts.value}
    return {
        "id": run_id,
        "path": inner.as_posix(),
        "name": directory.root.name,
        "project": "" if len(inner.parts) < 2 else "/".join(inner.parts[:-1]),
        "stage": fixed.stage,
        "algorithm": fixed.algorithm,
        "model": fixed.model,
        "state": _state(facts, directory),
        "step": facts.steps,
        "total_steps": facts.total,
        "started": fixed.created or None,
        "updated": facts.changed,
        "validation": validation,
        "reward_last": reward,
        "sparkline": curve,
        "problem": facts.note or None,
    }


def _state(facts: RunFacts, directory: RunDirectory) -> str:
    """`killed`: the process that trained the run ended without giving it back."""
    if facts.state != "interrupted":
        return facts.state
    try:
        owner = parse_json(read_bytes(directory.root / OWNER, most_bytes=4096))
        return "interrupted" if is_running(int(owner["pid"])) else "killed"
    except (OSError, ValueError, LookupError, TypeError):
        return "interrupted"


def _curve(
    directory: RunDirectory, fixed: FixedFacts
) -> tuple[float | None, list[float | None], float | None]:
    """First validation, the small curve, and its last value."""
    try:
        handle = open_records(directory.metrics)
    except OSError:
        return None, [], None
    try:
        _, first = shown_validation(first_validation(handle), fixed.best_metric)
        lines = spread_lines(handle, _POINTS)
    finally:
        os.close(handle)
    name = next((one for one in CURVES if any(one in line for line in lines)), None)
    found = [line.get(name) for line in lines] if name is not None else []
    # Whole numbers may be larger than any float.
    values = [v for v in found if isinstance(v, float) or (isinstance(v, int) and abs(v) < 2**63)]
    shown = [float(value) for value in values][:_POINTS]
    is_reward = name == CURVES[0] and shown
    return first, list[float | None](shown), shown[-1] if is_reward else None
