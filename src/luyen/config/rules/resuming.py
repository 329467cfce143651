"""S: whether a run begins, goes on with an earlier one, or would be another in its place."""

from collections.abc import Iterator
from pathlib import Path

from luyen.base.errors import UserError
from luyen.base.paths import is_directory
from luyen.base.rundir import RunDirectory
from luyen.config.resuming import ChangedKey, changed_keys, has_progress
from luyen.config.rules.rule import Finding, Situation, rule

_AFRESH = "choose another trainer.experiment_name"
_FORK = (
    "choose another trainer.experiment_name; to begin it with what this run has learned, also set "
    "trainer.resume_mode=path and trainer.resume_from_path={checkpoint}"
)
_OTHER_WEIGHTS = ("actor_rollout_ref.model.", "critic.model.", "trainer.stage")
"""Keys with which the weights of a checkpoint do not fit any more."""


@rule("S06", "error")
def resume_path_is_given(s: Situation) -> Iterator[Finding]:
    """`resume_mode: path` names a checkpoint that exists, and only it does."""
    trainer = s.config.trainer
    path = trainer.resume_from_path
    if trainer.resume_mode == "path" and path is None:
        yield Finding(
            field="trainer.resume_from_path",
            why="resume_mode=path does not say from where",
            fix="set it to a checkpoint directory (.../checkpoints/step_N)",
        )
    if trainer.resume_mode == "path" and path and not is_directory(path):
        yield Finding(
            field="trainer.resume_from_path",
            why="no such directory on this machine",
            fix="give a checkpoint directory (.../checkpoints/step_N)",
        )
    if trainer.resume_mode != "path" and path is not None:
        yield Finding(
            field="trainer.resume_from_path",
            why=f"resume_mode={trainer.resume_mode} does not read it",
            fix="set resume_mode=path, or drop it",
        )


@rule("S07", "error")
def fresh_run_does_not_overwrite(s: Situation) -> Iterator[Finding]:
    """A run that does not resume does not write over an earlier one."""
    saved, run = _saved(s), _run_there(s)
    if s.config.trainer.resume_mode == "disable" and (saved or run is not None):
        held = f"{len(saved)} checkpoints of an earlier run" if saved else "an earlier run"
        yield Finding(
            field="trainer.resume_mode",
            why=f"{s.run_directory()} holds {held}",
            fix="set resume_mode=auto to go on, or choose another experiment_name",
        )


@rule("S08", "note")
def run_will_resume(s: Situation) -> Iterator[Finding]:
    """A run that finds its own checkpoints goes on from the newest; changed keys are named."""
    saved = _saved(s)
    if s.config.trainer.resume_mode != "auto" or not saved:
        return
    changes = _changes(s)
    if any(one.kind is None for one in changes):
        return  # it will not: S24 says why
    total = s.config.trainer.total_training_steps
    if total is not None and _step(saved[-1]) >= total:
        yield Finding(
            field="trainer.resume_mode",
            why=f"the run in {s.run_directory()} has all of its {total} steps: "
            "nothing is left to do",
            fix="choose another experiment_name to begin anew, or raise total_training_steps",
        )
        return
    changed = [one.words() for one in changes if one.kind != "place"]
    with_what = f", with {', '.join(changed)}" if changed else ""
    yield Finding(
        field="trainer.resume_mode",
        why=f"the run will go on from {saved[-1]}{with_what}",
        fix="choose another experiment_name to start afresh",
    )


@rule("S24", "error")
def run_goes_on_as_it_is(s: Situation) -> Iterator[Finding]:
    """A run that goes on has the model, rows, reward and algorithm that it began with."""
    if s.config.trainer.resume_mode == "disable":
        return  # S07 speaks about it
    newest = [*_saved(s), s.run_directory() / "checkpoints" / "step_N"]
    fix = _FORK.format(checkpoint=newest[-2] if len(newest) > 1 else newest[-1])
    for one in _changes(s):
        if one.kind is None:
            yield Finding(
                field=one.key,
                why=f"the run in {s.run_directory()} has {one.before!r}, and would be another one",
                fix=_AFRESH if one.key.startswith(_OTHER_WEIGHTS) else fix,
            )


def _changes(s: Situation) -> list[ChangedKey]:
    """What is not as in the run that is there; nothing where it has done nothing yet."""
    run = _run_there(s)
    return changed_keys(run, s.config) if run is not None and has_progress(run) else []


def _run_there(s: Situation) -> RunDirectory | None:
    try:
        run = RunDirectory(s.run_directory())
        is_there = run.exists
    except (OSError, ValueError, UserError):  # a name that no folder can have
        return None
    return run if is_there else None


def _saved(s: Situation) -> list[Path]:
    """Checkpoints that are there already, the newest last."""
    try:
        return sorted(s.run_directory().glob("checkpoints/step_*"), key=_step)
    except (OSError, ValueError):  # a name that no folder can have
        return []


def _step(checkpoint: Path) -> int:
    digits = checkpoint.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1
