"""Begin or resume an offline run and carry it to its end."""

import time
import warnings
from contextlib import ExitStack
from typing import Any

from luyen.base.digests import DigestFile
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint, CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.offline import OfflineData, build_offline_data
from luyen.data.tokenizer import Tokenizer
from luyen.telemetry.curves import draw_curves
from luyen.telemetry.display import Display
from luyen.telemetry.patience import explained
from luyen.telemetry.sinks import open_sinks
from luyen.telemetry.spans import SPANS
from luyen.telemetry.summary import Change, Summary
from luyen.train.beginning import (
    facts_of,
    find_checkpoint,
    identity,
    open_directory,
    open_run_display,
)
from luyen.train.build import total_steps
from luyen.train.offline.course import OfflineCourse
from luyen.train.offline.files import OfflineFiles, load_parts
from luyen.train.offline.run import OfflineRun, train_offline
from luyen.train.offline.stage import Given
from luyen.train.offline.stages import STAGES
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.saving import demand_stage, known_at, open_store, saves_aside


class ChangedRows(UserWarning):
    """The rows of a run are not those that it began with."""


def run_offline(report: Report, *, trial_steps: int | None = None) -> Summary:
    """Learn from the rows that are given."""
    run = prepare_offline(report)
    run.trial_steps = trial_steps
    return _carry_out(run)


def prepare_offline(report: Report) -> OfflineRun:
    """A run with its directory, its files open, where its newest checkpoint left it."""
    config = report.config
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    data = offline_rows(config, tokenizer, display)
    directory = open_directory(report, data.given, facts_of(config, data.given))
    store = open_store(directory.checkpoints, config.trainer)
    resumed = find_checkpoint(report, store, directory)
    if resumed is not None:
        _warn_of_other_rows(directory)
    given = Given(
        config=config,
        data=data,
        tokenizer=tokenizer,
        device=report.plan.where.device,
        directory=directory,
        display=display,
    )
    with ExitStack() as opened:
        files = _open_files(report, directory, store, resumed, display)
        opened.callback(files.close)
        stage = STAGES[config.trainer.stage].build(given)
        steps = total_steps(config, len(data.train))
        course = OfflineCourse(config=config, data=data.given, stage=stage, total_steps=steps)
        run = OfflineRun(course, files, display)
        if resumed is not None:
            loop = load_state(resumed.path, "loop")
            demand_stage(loop, config.trainer.stage, resumed.path)
            stage.restore(load_parts(resumed.path, stage))
            run.go_on_from(loop)
        opened.pop_all()
    return run


def _warn_of_other_rows(directory: RunDirectory) -> None:
    """Say that the rows have changed: later steps learn from the new ones."""
    sessions = directory.read_resumptions()
    changed = sessions[-1].get("changed", {}) if sessions else {}
    begun = directory.read_manifest().get("datasets", {}).get("train")
    if changed.get("datasets", {}).get("train", begun) != begun:
        said = "data.train_files are not as when the run began: it goes on with the rows of now"
        warnings.warn(said, ChangedRows, stacklevel=2)


def _open_files(
    report: Report,
    directory: RunDirectory,
    store: CheckpointStore,
    resumed: Checkpoint | None,
    display: Display,
) -> OfflineFiles:
    """Metrics, digests and checkpoints; lines of steps that will be done again are dropped."""
    trainer = report.config.trainer
    first_step = resumed.step + 1 if resumed is not None else 0
    log = open_sinks(
        trainer.logger,
        directory=directory,
        who=identity(report, directory),
        display=display,
        first_step=first_step,
    )
    return OfflineFiles(
        directory,
        log,
        store,
        DigestFile(directory.digests, first_step=first_step),
        known=known_at(resumed),
        is_async=saves_aside(trainer, report.plan.where),
    )


def offline_rows(config: RunConfig, tokenizer: Tokenizer, display: Display) -> OfflineData[Any]:
    """The rows of the run; the display says what is done when it takes long."""
    words = "preparing rows: reading, checking and measuring data.train_files and data.val_files"
    with explained(display.waiting, words):
        kind = STAGES[config.trainer.stage]
        return build_offline_data(
            config.data,
            kinds=kind.kinds(config),
            columns=kind.columns(config),
            tokenizer=tokenizer,
            seed=config.trainer.seed,
        )


def _carry_out(run: OfflineRun) -> Summary:
    directory = run.files.directory
    SPANS.open(directory.events, process="controller")
    started, first = time.monotonic(), run.step
    run.display.start(run.total_steps, done=run.step)
    with ExitStack() as ending:
        for part in (SPANS, run.files, run.display):
            ending.callback(part.close)
        with run.interruption, run.watchdog:
            train_offline(run)
            run.files.settle()
    draw_curves(directory.metrics, directory.report)
    newest = run.files.store.latest()
    return Summary(
        headline="Interrupted" if run.interruption.is_wanted else "Finished",
        changes=_changes(run),
        steps=run.step - first,
        seconds=time.monotonic() - started,
        files={"metrics": directory.metrics, "checkpoints": directory.checkpoints},
        commands=_commands(run, newest),
    )


def _changes(run: OfflineRun) -> tuple[Change, ...]:
    """The first number that the stage is judged by and that was measured."""
    goal = next((g for g in run.stage.goals if g.metric in run.last), None)
    if goal is None:
        return ()
    before, after = run.first.get(goal.metric), run.last[goal.metric]
    return (Change(label=goal.label, before=before, after=after),)


def _commands(run: OfflineRun, newest: int | None) -> tuple[str, ...]:
    if newest is None:
        return ()
    checkpoint = run.files.directory.checkpoint(newest)
    if run.config.trainer.stage == "reward_model":
        return (f"luyen export {checkpoint} exported/",)
    return (f"luyen chat {checkpoint}", f"luyen export {checkpoint} exported/")
