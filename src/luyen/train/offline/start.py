"""Start or resume an offline run (SFT, preference, reward model, distillation)."""

import time
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
from luyen.telemetry.display import Display
from luyen.telemetry.plots import plot_curves
from luyen.telemetry.progress import explain_if_slow
from luyen.telemetry.sinks import open_sinks
from luyen.telemetry.spans import SPANS
from luyen.telemetry.summary import Change, RunSummary
from luyen.train.builders.run import total_steps
from luyen.train.builders.setup import (
    collect_manifest,
    find_resume_checkpoint,
    import_plugins,
    load_run_tokenizer,
    open_run_display,
    refuse_running,
    run_identity,
)
from luyen.train.interrupt import Interrupted
from luyen.train.offline import preference, reward_model, sft
from luyen.train.offline.loop import (
    OfflineRecorder,
    OfflineRun,
    OfflineSchedule,
    load_parts,
    train_offline,
)
from luyen.train.offline.stage import StageContext, StageKind
from luyen.train.record import metrics_at, open_store, require_stage, saves_in_background
from luyen.train.session import headline, note_run_events, open_session, release_on_error
from luyen.train.state import first_logged_step

STAGES: dict[str, StageKind] = {
    "sft": sft.SFT,
    "preference": preference.PREFERENCE,
    "reward_model": reward_model.REWARD_MODEL,
    "distill": sft.DISTILL,
}
"""Offline stages by `trainer.stage`."""


def run_offline(report: Report, *, trial_steps: int | None = None) -> RunSummary:
    """Train an offline stage; `trial_steps` ends the run early, without a checkpoint."""
    run = prepare_offline(report)
    run.trial_steps = trial_steps
    return _train_to_end(run)


def prepare_offline(report: Report) -> OfflineRun:
    """Build a run, open its directory and files, and restore its newest checkpoint."""
    config = report.config
    refuse_running(report)
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    data = offline_rows(config, tokenizer, display)
    session = open_session(report, data.given, collect_manifest(config, data.given))
    directory = session.directory
    context = StageContext(
        config=config,
        data=data,
        tokenizer=tokenizer,
        device=report.plan.where.device,
        directory=directory,
        display=display,
    )
    with ExitStack() as opened:
        release_on_error(opened, session)
        store = open_store(directory.checkpoints, config.trainer)
        resumed = find_resume_checkpoint(report, store, directory)
        files = _open_files(report, directory, store, resumed, display)
        opened.callback(files.close)  # also releases the claim
        stage = STAGES[config.trainer.stage].build(context)
        steps = total_steps(config, len(data.train))
        schedule = OfflineSchedule(config=config, data=data.given, stage=stage, total_steps=steps)
        run = OfflineRun(schedule, files, display)
        if resumed is not None:
            loop = load_state(resumed.path, "loop")
            require_stage(loop, config.trainer.stage, resumed.path)
            stage.restore(load_parts(resumed.path, stage))
            run.restore_progress(loop)
        session.begin()
        opened.pop_all()
    return run


def _open_files(
    report: Report,
    directory: RunDirectory,
    store: CheckpointStore,
    resumed: Checkpoint | None,
    display: Display,
) -> OfflineRecorder:
    """Open metrics, digests and checkpoints; lines of steps that will be repeated are dropped."""
    trainer = report.config.trainer
    first_step = first_logged_step(
        load_state(resumed.path, "loop") if resumed is not None else None
    )
    log = open_sinks(
        trainer.logger,
        directory=directory,
        identity=run_identity(report, directory),
        display=display,
        first_step=first_step,
    )
    return OfflineRecorder(
        directory,
        log,
        store,
        DigestFile(directory.digests, first_step=first_step),
        last_metrics=metrics_at(resumed),
        is_async=saves_in_background(trainer, report.plan.where),
    )


def offline_rows(config: RunConfig, tokenizer: Tokenizer, display: Display) -> OfflineData[Any]:
    """Load the rows; the display shows a message when it takes long."""
    words = "preparing rows: reading, checking and measuring data.train_files and data.val_files"
    with explain_if_slow(display.waiting, words):
        kind = STAGES[config.trainer.stage]
        return build_offline_data(
            config.data,
            kinds=kind.kinds(config),
            columns=kind.columns(config),
            tokenizer=tokenizer,
            seed=config.trainer.seed,
        )


def _train_to_end(run: OfflineRun) -> RunSummary:
    directory = run.files.directory
    started, first = time.monotonic(), run.step
    with ExitStack() as ending:
        note_run_events(ending, directory)
        for part in (SPANS, run.files, run.display):
            ending.callback(part.close)
        SPANS.open(directory.events, process="controller")
        run.display.start(run.total_steps, done=run.step)
        with run.interruption, run.watchdog:
            try:
                train_offline(run)
            except Interrupted:
                run.save()
            run.files.flush()
    plot_curves(directory.metrics, directory.report)
    newest, done = run.files.store.latest(), run.step - (run.unrecorded is not None)
    return RunSummary(
        headline=headline(directory, run.interruption, step=done, last_step=run.last_step),
        signal=run.interruption.number,
        changes=_changes(run),
        steps=run.step - first,
        seconds=time.monotonic() - started,
        files={"metrics": directory.metrics, "checkpoints": directory.checkpoints},
        commands=_commands(run, newest),
    )


def _changes(run: OfflineRun) -> tuple[Change, ...]:
    """First and last value of the first goal metric that was measured."""
    goal = next((g for g in run.stage.goals if g.metric in run.last), None)
    if goal is None:
        return ()
    before, after = run.first.get(goal.metric), run.last[goal.metric]
    return (Change(label=goal.label, before=before, after=after),)


def _commands(run: OfflineRun, newest: int | None) -> tuple[str, ...]:
    is_cut = run.unrecorded is not None or run.step < run.last_step
    more = (f"luyen train --resume {run.files.directory.root}",) if is_cut else ()
    if newest is None:
        return more
    checkpoint = run.files.directory.checkpoint(newest)
    chat = () if run.config.trainer.stage == "reward_model" else (f"luyen chat {checkpoint}",)
    return (*more, *chat, f"luyen export {checkpoint} exported/")
