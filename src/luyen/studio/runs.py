"""The runs below a folder: what each is, how far it got, and whether it is still going on."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast, final

from luyen.base.claims import is_claimed
from luyen.base.errors import UserError
from luyen.base.parsing import parse_json
from luyen.base.reading import read_bytes
from luyen.base.rundir import RunDirectory, step_of
from luyen.telemetry.artifact_registry import run_directories
from luyen.telemetry.notes import last_note

State = Literal["running", "finished", "interrupted", "damaged"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run at a glance.

    Example:
        >>> run = RunFacts(path="runs/a/b", run="20260101-000000-abcdef", state="finished")
        >>> run.name
        'a/b'
    """

    path: str
    """Its directory."""
    run: str
    """Its id."""
    state: State
    """running: a process has it now; finished: its last step is saved; damaged: see `note`."""
    stage: str = "?"
    """What kind of training it is."""
    steps: int = 0
    """Steps that were measured or saved."""
    total: int | None = None
    """Steps that it is to have; None where that is not known."""
    metric: str | None = None
    """The number that its last validation is judged by."""
    value: float | None = None
    """That number; None before the first validation."""
    created: str = ""
    """When it was begun."""
    changed: str = ""
    """When it last wrote a file."""
    bytes: int = 0
    """Size of all its files."""
    note: str = ""
    """What is wrong with it, or why it ended before its last step."""

    @property
    def name(self) -> str:
        """Project and experiment."""
        return "/".join(Path(self.path).parts[-2:])

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def list_runs(root: Path) -> list[RunFacts]:
    """Every run below a folder, the one that was begun last at the end."""
    return sorted((_facts(run) for run in run_directories(root)), key=lambda run: run.created)


def _facts(run: RunDirectory) -> RunFacts:
    size, newest = _size(run.root)
    where = {"path": str(run.root), "bytes": size, "changed": _time(newest)}
    try:
        manifest = RunDirectory.open(run.root).read_manifest()
        config = run.read_settings()
        trainer: dict[str, Any] = config["trainer"]
        total = _total(config, manifest)
    except (UserError, LookupError, TypeError, AttributeError, ValueError) as error:
        note = str(error.why if isinstance(error, UserError) else error)
        return RunFacts(run="?", state="damaged", note=note, **where)
    saved = _newest_checkpoint(run)
    last, metric, value = _last_measured(run.metrics, trainer.get("best_metric"))
    is_over = total is not None and saved is not None and saved >= total
    state: State = "finished" if is_over else "interrupted"
    return RunFacts(
        run=manifest["run_id"],
        state="running" if is_claimed(run.root) else state,
        stage=trainer["stage"],
        steps=max(last, saved or 0),
        total=total,
        metric=metric,
        value=value,
        created=manifest["created"],
        note="" if is_over else last_note(run.root),
        **where,
    )


def _total(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> int | None:
    """Steps of the run, as its configuration and the number of its rows make them."""
    trainer = config["trainer"]
    if trainer["total_training_steps"] is not None:
        return int(trainer["total_training_steps"])
    rows = manifest.get("rows", {}).get("train")
    if rows is None:
        return None
    return int(trainer["total_epochs"] * rows // config["data"]["train_batch_size"])


def _newest_checkpoint(run: RunDirectory) -> int | None:
    try:
        names = os.listdir(run.checkpoints)
    except OSError:
        return None
    return max((step for name in names if (step := step_of(name)) is not None), default=None)


def _last_measured(file: Path, wanted: str | None) -> tuple[int, str | None, float | None]:
    """The last step with numbers, and name and value of what was last validated."""
    try:
        lines = read_bytes(file).split(b"\n")[:-1]
    except OSError:
        return 0, None, None
    last = int(_entry(lines[-1]).get("step", 0)) if lines else 0
    for line in reversed(lines):
        if b"val/" not in line and b"/val_" not in line:
            continue
        entry = _entry(line)
        known = sorted(name for name in entry if name.startswith("val/") or "/val_" in name)
        if known:
            name = wanted if wanted in known else known[0]
            return last, name, float(entry[name])
    return last, None, None


def _entry(line: bytes) -> dict[str, Any]:
    try:
        found = parse_json(line)
    except ValueError:
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _size(folder: Path) -> tuple[int, float]:
    """Bytes of all files below a folder, and the time of the newest."""
    total, newest = 0, 0.0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.stat(os.path.join(place, name), follow_symlinks=False)
            except OSError:
                continue  # a run that goes on renames and removes
            total, newest = total + found.st_size, max(newest, found.st_mtime)
    return total, newest


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
