"""The stages of a pipeline, one after the other: what is done is skipped, what was begun goes on.

A stage is done when its model is exported and noted in its run directory. Nothing else is kept, so
the same command goes on wherever it was killed.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from luyen.base.claims import release
from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.config.artifact_refs import refs_in, with_paths
from luyen.config.check import Report, check_tree
from luyen.config.machine import Machine
from luyen.config.pipeline import Pipeline, Stage
from luyen.config.pipeline_check import CHECKPOINT, check_pipeline, run_directory
from luyen.telemetry.artifact_lines import NAME, current, read_artifacts
from luyen.telemetry.artifact_registry import Registry, made_at
from luyen.telemetry.artifacts import Artifact, require_unchanged
from luyen.telemetry.figures import HEADING
from luyen.telemetry.summary import Summary, interrupted_code
from luyen.train.directory import claim_run
from luyen.train.lineage import read_checkpoint
from luyen.train.stage_changes import require_same_stage
from luyen.train.stage_model import export_stage
from luyen.train.start import run_training

EXPORT = "export"
"""The folder of a run directory that holds what its stage hands on."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a finished stage hands on.

    Example:
        >>> Handed(run=Path("runs/demo/sft")).model.as_posix()
        'runs/demo/sft/export'
    """

    run: Path
    """Its run directory."""

    @property
    def model(self) -> Path:
        """Its exported model."""
        return self.run / EXPORT

    def artifact(self) -> Artifact | None:
        """The exported model as it was noted; None where the stage is not done."""
        return made_at(self.model) if self.model.is_dir() else None

    def checkpoint(self) -> Path:
        """Its newest checkpoint."""
        store = CheckpointStore(RunDirectory(self.run).checkpoints)
        newest = store.newest_sound()
        assert newest is not None, "a stage that is done has a checkpoint"
        return newest.path


def run_pipeline(pipeline: Pipeline, say: Callable[[str], None], *, machine: Machine) -> int:
    """Carry every stage to its end; the exit code, which is 0 when the last one got there.

    The last stage is claimed first: one process carries out a pipeline, from its beginning on.
    """
    checked = check_pipeline(pipeline, machine=machine)
    for stage in checked:
        stage.report.require_sound()
    with _claimed(run_directory(checked[-1].report.config)):
        return _carry_out_all(pipeline, say, machine)


@contextmanager
def _claimed(run: Path) -> Iterator[None]:
    claim_run(run)
    try:
        yield
    finally:
        release(run)


def _carry_out_all(pipeline: Pipeline, say: Callable[[str], None], machine: Machine) -> int:
    handed: dict[str, Handed] = {}
    for number, stage in enumerate(pipeline.stages, 1):
        heading = f"stage {number} of {len(pipeline.stages)}: {stage.name}"
        found, sources = _report(stage, handed, machine)
        place = Handed(run=run_directory(found.config))
        handed[stage.name] = place
        if _is_done(stage, found, place, sources):
            say(f"{heading} is done ({place.run})")
            continue
        say(f"{heading} ({place.run})")
        with _claimed(place.run):  # until its model is handed on
            summary = _carry_out(found, place, heading, say)
        is_last = number == len(pipeline.stages)
        if summary.is_interrupted or (summary.signal is not None and not is_last):
            say(f"Interrupted in {heading}; the same command goes on from there")
            return interrupted_code(summary.signal)
    return 0


def _carry_out(report: Report, place: Handed, heading: str, say: Callable[[str], None]) -> Summary:
    """Train a stage and, where it reached its end, hand its model on."""
    token = HEADING.set(heading)
    try:
        summary = run_training(replace(report, goes_on=True))
    finally:
        HEADING.reset(token)
    say(f"\n{summary.text()}\n")
    _free_memory()
    if not summary.is_interrupted:
        say(f"  handed on  {export_stage(place.run, place.model)}\n")
        _free_memory()
    return summary


def _report(
    stage: Stage, handed: dict[str, Handed], machine: Machine
) -> tuple[Report, dict[str, Artifact]]:
    """The check of a stage with real paths, and what it is handed, by key."""
    paths: dict[str, str] = {}
    sources: dict[str, Artifact] = {}
    trainer = stage.tree.values.get("trainer", {})
    root = expanded(str(trainer.get("default_local_dir", "runs")))
    for key, words in refs_in(stage.tree).items():
        name, _, part = words.partition("/")
        if part == CHECKPOINT and name in handed:
            sources[key] = read_checkpoint(key, handed[name].checkpoint())
            paths[key] = sources[key].path
            continue
        found = Registry(root).one(words, key) if "@" in words else handed[name].artifact()
        assert found is not None, f"stage {name} has not run"
        require_unchanged(found, key)
        paths[key], sources[key] = found.path, found
    report = check_tree(with_paths(stage.tree, paths), machine=machine)
    # `require_same_stage` says it for a stage: of everything that it was made from.
    report = replace(report, problems=tuple(p for p in report.problems if p.id != "S24"))
    if not report.is_sound:
        first = next(problem for problem in report.problems if problem.severity == "error")
        raise UserError(first.field, first.value, first.why, first.fix)
    return report, sources


def _is_done(stage: Stage, report: Report, place: Handed, sources: dict[str, Artifact]) -> bool:
    """Whether a stage is behind; a UserError where what it was made from has changed since."""
    directory = RunDirectory(place.run)
    if not directory.exists:
        return False
    noted = current(read_artifacts(directory.root / NAME))
    require_same_stage(stage.name, directory, report.config, noted, sources)
    made = place.artifact()
    if made is None:
        return False
    require_unchanged(made, f"stage {stage.name}")
    return True


def _free_memory() -> None:
    """A stage leaves nothing behind on the device for the next one to stumble over."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
