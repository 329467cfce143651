"""The stages of a pipeline, one after the other: what is done is skipped, what was begun goes on.

A stage is done when its model is exported and noted in its run directory. Nothing else is kept, so
the same command goes on wherever it was killed.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

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
from luyen.telemetry.display import HEADING
from luyen.train.lineage import read_checkpoint
from luyen.train.stage_changes import require_same_stage
from luyen.train.stage_model import export_stage
from luyen.train.start import run_training
from luyen.train.unbuilt import refuse_unbuilt

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


def run_pipeline(pipeline: Pipeline, say: Callable[[str], None], *, machine: Machine) -> bool:
    """Carry every stage to its end; whether the last one got there."""
    for checked in check_pipeline(pipeline, machine=machine):
        refuse_unbuilt(checked.report)
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
        if not _carry_out(found, place, heading, say):
            say(f"Interrupted in {heading}; the same command goes on from there")
            return False
    return True


def _carry_out(report: Report, place: Handed, heading: str, say: Callable[[str], None]) -> bool:
    token = HEADING.set(heading)
    try:
        summary = run_training(replace(report, goes_on=True))
    finally:
        HEADING.reset(token)
    say(f"\n{summary.text()}\n")
    _free_memory()
    if summary.is_interrupted:
        return False
    say(f"  handed on  {export_stage(place.run, place.model)}\n")
    _free_memory()
    return True


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
