"""Run the stages of a pipeline in order: skip finished ones, resume one in progress.

A stage is done when its model is exported and noted in its run directory. There is no other state,
so the same command resumes wherever it was killed.
"""

import gc
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.run_lock import release
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.config.check import Report, check_tree
from luyen.config.loader.parse import stored_values
from luyen.config.loader.tree import leaves
from luyen.config.machine import Machine
from luyen.config.named_files import named_fingerprints, refs_in, with_paths
from luyen.config.pipeline import CHECKPOINT, Pipeline, Stage, check_pipeline, run_directory
from luyen.config.resume import kind_of
from luyen.config.schema.run import RunConfig
from luyen.pipeline.export import export_checkpoint
from luyen.telemetry.artifact_registry import ArtifactRegistry, made_at
from luyen.telemetry.artifacts import (
    NAME,
    Artifact,
    current,
    difference,
    read_artifacts,
    require_unchanged,
    short,
)
from luyen.telemetry.display import HEADING
from luyen.telemetry.summary import RunSummary, interrupted_code
from luyen.train.lineage import models_of, read_checkpoint
from luyen.train.session import claim_run
from luyen.train.start import run_training

_MODEL_KEYS = ("path", "model_path", "lora_adapter_path", "teacher_path")


def require_same_stage(
    stage: str,
    directory: RunDirectory,
    config: RunConfig,
    noted: Sequence[Artifact],
    handed: Mapping[str, Artifact],
) -> None:
    """A UserError that names the first key, file or artifact that changed since the stage began.

    `noted` are the artifacts of its run, `handed` the current outputs of earlier stages, by key.
    """
    changes: list[str] = [
        *_changed_keys(directory, config, handed),
        *_changed_inputs(noted, handed, models_of(config, known=handed)),
        *_changed_code(directory, config),
    ]
    if changes:
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        why = f"it was begun with something else: {changes[0]}{more}"
        fix = f"undo the change, give the stage another name, or remove {directory.root}"
        raise UserError("stage", stage, why, fix)


def _changed_keys(
    directory: RunDirectory, config: RunConfig, handed: Mapping[str, Artifact]
) -> Iterator[str]:
    before = _settings(directory.read_settings())
    now = _settings(stored_values(config))
    for key in sorted(before.keys() | now.keys()):
        is_free = kind_of(key) in ("place", "records")
        is_handed = any(one == key or one.startswith(f"{key}.") for one in handed)
        if not is_free and not is_handed and before.get(key) != now.get(key):
            yield f"{key} was {before.get(key)!r} and is {now.get(key)!r}"


def _settings(tree: Any) -> dict[str, Any]:
    return dict(leaves(tree))


def _changed_inputs(
    noted: Sequence[Artifact], handed: Mapping[str, Artifact], models: Sequence[Artifact]
) -> Iterator[str]:
    """Changed inputs; `models` are hashed models that do not come from earlier stages."""
    now = {one.used_as: one for one in models if one.files}
    for one in noted:
        if one.used_as is None:
            continue
        given = handed.get(one.used_as)
        if given is not None:
            how = f"{one.used_as} was {short(one.hash)} and is {short(given.hash)}"
            how = how if given.hash != one.hash else None
        else:
            how = _changed_files(one, now.get(one.used_as))
        if how is not None:
            yield how


def _changed_files(one: Artifact, now: Artifact | None) -> str | None:
    """How an input differs; `now` is the current artifact, if it has files."""
    if (
        now is None or not one.files
    ):  # without files, e.g. a hub model that is not cached, there is nothing to compare
        return difference(one)
    if now.hash == one.hash:
        return None
    added = sorted(now.files.keys() - one.files.keys())
    return difference(one) or f"{Path(now.path) / added[0]} was added"


def _changed_code(directory: RunDirectory, config: RunConfig) -> Iterator[str]:
    """Changed files of rewards, plugins and tools; models are compared as artifacts."""
    before: dict[str, Any] = directory.read_manifest().get("files", {})
    now = named_fingerprints(config, folder=Path.cwd())
    for name, facts in now.items():
        is_model = any(f".{key}." in name for key in _MODEL_KEYS)
        was = before.get(name, {}).get("fingerprint")
        if not is_model and was is not None and was != facts["fingerprint"]:
            yield f"{facts['path']} has other content"


def export_stage(run: Path, folder: Path) -> str:
    """Export the newest checkpoint of a run into `folder`, adapter merged; returns its title.

    An incomplete export of a killed process is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # Trusted: this process has just written the run's configuration.
    export_checkpoint(str(run), folder, merge=None, is_trusted=True)
    made = made_at(folder)
    assert made is not None, "an export of a run is noted"
    return f"{made.title}  {folder}"


EXPORT = "export"
"""Subfolder of a run directory with the exported model of its stage."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """Output of a finished stage.

    Example:
        >>> StageOutput(run=Path("runs/demo/sft")).model.as_posix()
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
    """Run all stages; the exit code, 0 when the last one finished.

    The last stage is claimed first, so only one process runs a pipeline.
    """
    checked = check_pipeline(pipeline, machine=machine)
    for stage in checked:
        stage.report.require_sound()
    with _claimed(run_directory(checked[-1].report.config)):
        return _run_stages(pipeline, say, machine)


@contextmanager
def _claimed(run: Path) -> Iterator[None]:
    claim_run(run)
    try:
        yield
    finally:
        release(run)


def _run_stages(pipeline: Pipeline, say: Callable[[str], None], machine: Machine) -> int:
    handed: dict[str, StageOutput] = {}
    for number, stage in enumerate(pipeline.stages, 1):
        heading = f"stage {number} of {len(pipeline.stages)}: {stage.name}"
        found, sources = _report(stage, handed, machine)
        place = StageOutput(run=run_directory(found.config))
        handed[stage.name] = place
        if _is_done(stage, found, place, sources):
            say(f"{heading} is done ({place.run})")
            continue
        say(f"{heading} ({place.run})")
        with _claimed(place.run):  # until its model is exported
            summary = _run_stage(found, place, heading, say)
        is_last = number == len(pipeline.stages)
        if summary.is_interrupted or (summary.signal is not None and not is_last):
            say(f"Interrupted in {heading}; the same command goes on from there")
            return interrupted_code(summary.signal)
    return 0


def _run_stage(
    report: Report, place: StageOutput, heading: str, say: Callable[[str], None]
) -> RunSummary:
    """Train a stage and, if it finished, export its model."""
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
    stage: Stage, handed: dict[str, StageOutput], machine: Machine
) -> tuple[Report, dict[str, Artifact]]:
    """The check of a stage with references resolved to paths, and its inputs by key."""
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
        found = ArtifactRegistry(root).one(words, key) if "@" in words else handed[name].artifact()
        assert found is not None, f"stage {name} has not run"
        require_unchanged(found, key)
        paths[key], sources[key] = found.path, found
    report = check_tree(with_paths(stage.tree, paths), machine=machine)
    # `require_same_stage` covers what rule S24 checks.
    report = replace(report, problems=tuple(p for p in report.problems if p.id != "S24"))
    if not report.is_sound:
        first = next(problem for problem in report.problems if problem.severity == "error")
        raise UserError(first.field, first.value, first.why, first.fix)
    return report, sources


def _is_done(
    stage: Stage, report: Report, place: StageOutput, sources: dict[str, Artifact]
) -> bool:
    """Whether a stage is done; a UserError where its configuration or inputs have changed."""
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
    """Free device memory before the next stage."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
