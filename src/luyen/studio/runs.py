"""Runs on disk: state, progress, size, and files or lines that are missing from them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast, final

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.run_lock import is_claimed
from luyen.base.rundir import RunDirectory, step_of
from luyen.checkpoint.store import CheckpointStore, read_manifest
from luyen.studio.metrics_file import VALIDATION, lines_from_end, open_records, parsed_line
from luyen.telemetry.artifact_registry import run_directories
from luyen.telemetry.display import MEAN, VALIDATION_REWARD, validated
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.summary import last_note, stopped_early

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
    """running: locked by a process; finished: the last step is saved, or that after which the run
    was to stop early; damaged: see `note`."""
    stage: str = "?"
    """What kind of training it is."""
    steps: int = 0
    """Steps that were measured or saved."""
    total: int | None = None
    """Planned steps; None if unknown."""
    metric: str | None = None
    """The validation metric that is shown."""
    value: float | None = None
    """Its last value; None before the first validation."""
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedFacts:
    """What manifest and configuration say of a run, which training does not change.

    Example:
        >>> FixedFacts(run="?", damage="it is missing").total is None
        True
    """

    run: str
    """Its id."""
    stage: str = "?"
    """What kind of training it is."""
    algorithm: str = ""
    """Advantage estimator, or loss of an offline stage; "" where there is none."""
    model: str = ""
    """Path or name of the model."""
    total: int | None = None
    """Planned steps; None if unknown."""
    created: str = ""
    """When it was begun."""
    best_metric: str | None = None
    """The validation metric that decides which checkpoint is best."""
    damage: str | None = None
    """Why the files cannot be read; None: they can."""


def list_runs(root: Path) -> list[RunFacts]:
    """Every run below a folder, the one that was begun last at the end."""
    return sorted((run_facts(run) for run in run_directories(root)), key=lambda run: run.created)


def run_facts(run: RunDirectory) -> RunFacts:
    """State, steps and newest measurement of a run; `damaged` where its files cannot be read."""
    size, newest = _size(run.root)
    return facts_now(run, fixed_facts(run), size=size, changed=_time(newest))


def fixed_facts(run: RunDirectory) -> FixedFacts:
    """Manifest and configuration of a run in short."""
    try:
        manifest = RunDirectory.open(run.root).read_manifest()
        config = run.read_settings()
        trainer: dict[str, Any] = config["trainer"]
        stage = str(trainer["stage"])
        return FixedFacts(
            run=manifest["run_id"],
            stage=stage,
            algorithm=_algorithm(config, stage),
            model=str(_below(config, "actor_rollout_ref", "model", "path") or ""),
            total=_total(config, manifest),
            created=str(manifest.get("created") or ""),
            best_metric=trainer.get("best_metric"),
        )
    except UserError as error:
        return FixedFacts(run="?", damage=damage_of(error))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        return FixedFacts(run="?", damage=str(error))


def damage_of(error: UserError) -> str:
    """What is wrong with a file of a run, and which file it is.

    Example:
        >>> damage_of(UserError("file", "runs/a/manifest.json", "it is missing", "restore it"))
        'manifest.json: it is missing'
    """
    is_file = error.field == "file" and isinstance(error.value, str | Path)
    return f"{Path(error.value).name}: {error.why}" if is_file else error.why


def facts_now(run: RunDirectory, fixed: FixedFacts, *, size: int, changed: str) -> RunFacts:
    """State, steps and newest measurement of a run whose fixed facts are known."""
    where = {"path": str(run.root), "bytes": size, "changed": changed}
    if fixed.damage is not None:
        return RunFacts(run="?", state="damaged", note=fixed.damage, **where)
    total = fixed.total
    saved = _newest_checkpoint(run)
    last, metric, value = _last_measured(run.metrics, fixed.best_metric)
    # A step that was stopped in its validation is saved, and has no line yet.
    done = min(saved or 0, last) if run.metrics.is_file() else saved or 0
    is_over = total is not None and saved is not None and done >= total
    said = "" if is_over else last_note(run.root)
    is_over |= saved == done and said.startswith(f"{stopped_early(done)}:")
    state: State = "finished" if is_over else "interrupted"
    return RunFacts(
        run=fixed.run,
        state="running" if is_claimed(run.root) else state,
        stage=fixed.stage,
        steps=max(last, saved or 0),
        total=total,
        metric=metric,
        value=value,
        created=fixed.created,
        note=said,
        **where,
    )


def _algorithm(config: Mapping[str, Any], stage: str) -> str:
    if stage == "rl":
        return str(_below(config, "algorithm", "adv_estimator") or "")
    names = _below(config, "preference", "loss_type") if stage == "preference" else None
    return ", ".join(map(str, cast(list[Any], names))) if isinstance(names, list) else ""


def _below(tree: Any, *names: str) -> Any:
    for name in names:
        tree = cast(dict[str, Any], tree).get(name) if isinstance(tree, dict) else None
    return tree


def _total(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> int | None:
    """Total steps by configuration and number of rows."""
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


ACCURACY = "val/accuracy"


def _last_measured(file: Path, wanted: str | None) -> tuple[int, str | None, float | None]:
    """The last step with numbers, and name and value of what was last validated."""
    try:
        handle = open_records(file)
    except OSError:
        return 0, None, None
    try:
        last: int | None = None
        for line in lines_from_end(handle):
            if last is None:
                last = _whole(parsed_line(line).get("step"))
            if any(mark in line for mark in VALIDATION):
                name, value = shown_validation(parsed_line(line), wanted)
                if name is not None:
                    return last, name, value
        return last or 0, None, None
    finally:
        os.close(handle)


def shown_validation(
    entry: Mapping[str, Any], wanted: str | None
) -> tuple[str | None, float | None]:
    """Name and value of the validation metric of a line that is shown; None without one."""
    known = sorted(name for name in entry if name.startswith("val/") or "/val_" in name)
    if not known:
        return None, None
    name = wanted if wanted in known else known[0]
    try:
        if name == ACCURACY and VALIDATION_REWARD in validated(entry):
            # With rewards other than 0 and 1, a share that reaches 1 says little.
            name = next(one for one in known if one.startswith(MEAN))
        return name, float(entry[name])
    except (TypeError, ValueError, OverflowError):
        return name, None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


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


# Missing parts of a run, detected by comparing its files.
#
# Checksums detect a changed file. A removed file, or one that lost its last lines, looks like that
# of a shorter run; only the other files of the run show the difference.

_REWARDS = "rewards"
"""The stage that only steps with rollouts have."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPart:
    """Something that a file should hold.

    Example:
        >>> MissingPart(path=Path("digests.jsonl"), why="it has no line of step 3").is_damage
        True
    """

    path: Path
    """The file."""
    why: str
    """What is missing, and which file knows of it."""
    is_damage: bool = True
    """Whether it is damage; users also remove rollouts on purpose, to free space."""


def missing_parts(run: RunDirectory) -> list[MissingPart]:
    """Missing parts of a run; unreadable files are not used as evidence.

    A step writes its digest, its metrics and its checkpoint, in this order, and its rollouts in a
    thread that has ended before the digest of the next step and before the checkpoint. Files are
    read in an order in which a running process causes no false positives.
    """
    try:
        saved = CheckpointStore(run.checkpoints).list()
        before = _measured(run)
        digested, with_rollouts = _digested(run)
        after = _measured(run)
        chained = [step for step in saved if _is_chained(run.checkpoint(step))]
        keeps = run.metrics.is_file() or _keeps_metrics(run)
    except UserError:
        return []
    unsure = _unsure(digested, saved)
    lost = (digested - after) - unsure if keeps else set[int]()
    return [
        *_lines(run.digests, before - digested if digested else set(), run.metrics),
        *_whole_file(run.digests, bool(chained and not digested)),
        *_lines(run.metrics, lost, run.digests),
        *_rollouts(run, with_rollouts - unsure),
    ]


def _lines(path: Path, steps: set[int], witness: Path) -> Iterator[MissingPart]:
    if steps:
        first, last = min(steps), max(steps)
        named = f"step {first}" if first == last else f"{len(steps)} steps, {first} to {last}"
        yield MissingPart(path=path, why=f"it has no line of {named}, and {witness.name} has")


def _whole_file(path: Path, is_lost: bool) -> Iterator[MissingPart]:
    if is_lost:
        yield MissingPart(path=path, why="it is missing or empty, and checkpoints hold its chain")


def _rollouts(run: RunDirectory, steps: set[int]) -> Iterator[MissingPart]:
    gone = [step for step in sorted(steps) if not run.rollouts(step).is_file()]
    if gone:
        more = f", and so are those of {len(gone) - 1} more steps" if len(gone) > 1 else ""
        why = f"it is missing{more}, and {run.digests.name} has the step"
        yield MissingPart(path=run.rollouts(gone[0]), why=why, is_damage=False)


def _unsure(digested: set[int], saved: tuple[int, ...]) -> set[int]:
    """The last digest, whose metrics and rollouts the process may not have written yet, or never.

    Empty if there is a checkpoint of the step, which is written after them.
    """
    return {max(digested)} - set(saved) if digested else set()


def _digested(run: RunDirectory) -> tuple[set[int], set[int]]:
    """Steps that have a digest, and those of them with rollouts: offline steps have none."""
    found = read_digests(run.digests) if run.digests.is_file() else []
    with_rollouts = {digest.step for digest in found if _REWARDS in digest.stages}
    return {digest.step for digest in found}, with_rollouts


def _measured(run: RunDirectory) -> set[int]:
    found = read_metrics(run.metrics) if run.metrics.is_file() else []
    return {line.step for line in found}


def _is_chained(checkpoint: Path) -> bool:
    return read_manifest(checkpoint)["facts"].get("chain") is not None


def _keeps_metrics(run: RunDirectory) -> bool:
    return "jsonl" in (run.read_settings().get("trainer") or {}).get("logger", ())
