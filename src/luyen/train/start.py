"""Begin or resume a run, carry it to its end, and say what it reached."""

import time
from contextlib import ExitStack
from pathlib import Path

from luyen.base.digests import DigestFile
from luyen.base.garbage import settled
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint, CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.telemetry.curves import draw_curves
from luyen.telemetry.display import Display
from luyen.telemetry.figures import ACCURACY, VALIDATION_REWARD, mean_reward, validated
from luyen.telemetry.journal import WorkJournals
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.sinks import open_sinks
from luyen.telemetry.spans import SPANS
from luyen.telemetry.summary import FINISHED, Change, Summary
from luyen.train.beginning import (
    facts_of,
    find_checkpoint,
    identity,
    open_run_display,
    prepare_rows,
    refuse_running,
)
from luyen.train.build import build_run
from luyen.train.build_roles import surroundings_of
from luyen.train.directory import open_session
from luyen.train.interrupt import Interrupted
from luyen.train.offline.start import run_offline
from luyen.train.online import train_online
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.recorder import Recorder, restore
from luyen.train.recovery import until_done
from luyen.train.run import OnlineRun
from luyen.train.saving import known_at, open_store, saves_aside
from luyen.train.session import headline, note_what_happens, own_until_wired
from luyen.train.state import first_line
from luyen.train.work import settings_print


def run_training(report: Report, *, trial_steps: int | None = None) -> Summary:
    """Train as the configuration says. It must have passed its check.

    With `trial_steps` the run ends after so many and leaves no checkpoint.
    """
    report.require_sound()
    if report.config.trainer.stage != "rl":
        return run_offline(report, trial_steps=trial_steps)

    def carry_out(run: OnlineRun) -> Summary:
        run.trial_steps = trial_steps
        return _carry_out(run)

    return until_done(report, prepare_online, carry_out)


def prepare_online(report: Report) -> OnlineRun:
    """A run with its directory, its files open, where its newest checkpoint left it."""
    config = report.config
    refuse_running(report)
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    surroundings = surroundings_of(config)
    offered = surroundings.offered if surroundings is not None else None
    data = prepare_rows(config, tokenizer, display, offered=offered)
    session = open_session(report, data, facts := facts_of(config, data))
    directory = session.directory
    with ExitStack() as opened:
        own_until_wired(opened, session)
        store = open_store(directory.checkpoints, config.trainer)
        resumed = find_checkpoint(report, store, directory)
        recorder = _open_recorder(report, directory, store, resumed, display, opened)
        run = build_run(report, data, tokenizer, recorder, display, surroundings)
        opened.callback(run.roles.close)
        opened.callback(run.reward.close)
        _go_on_from(resumed, run, facts)
        session.begin()
        opened.pop_all()
    return run


def _open_recorder(
    report: Report,
    directory: RunDirectory,
    store: CheckpointStore,
    resumed: Checkpoint | None,
    display: Display,
    opened: ExitStack,
) -> Recorder:
    """Metrics, digests and checkpoints; lines of steps that will be done again are dropped."""
    trainer = report.config.trainer
    first_step = first_line(load_state(resumed.path, "loop") if resumed is not None else None)
    log = open_sinks(
        trainer.logger,
        directory=directory,
        who=identity(report, directory),
        display=display,
        first_step=first_step,
    )
    opened.callback(log.close)
    digests = DigestFile(directory.digests, first_step=first_step)
    opened.callback(digests.close)
    is_async = saves_aside(trainer, report.plan.where)
    return Recorder(directory, log, store, digests, known=known_at(resumed), is_async=is_async)


def _go_on_from(resumed: Checkpoint | None, run: OnlineRun, facts: Manifest) -> None:
    """Put the run where a checkpoint left it, or at its beginning, with its journals open."""
    if resumed is None:
        _open_journals(run, facts, done=-1)
        return
    state = restore(resumed.path, run.roles)
    _open_journals(run, facts, done=first_line(state.as_json()) - 1)
    run.restore(state)


def _open_journals(run: OnlineRun, facts: Manifest, *, done: int) -> None:
    """Work goes into journals from now on; that of steps up to `done` is not needed any more."""
    directory = run.recorder.directory
    run.recorder.journals = WorkJournals(directory.journal, run_id=directory.run_id)
    run.recorder.journals.forget(done)
    run.settings = settings_print(run.config, facts)


def _carry_out(run: OnlineRun) -> Summary:
    directory = run.recorder.directory
    started, first = time.monotonic(), run.step
    with ExitStack() as ending:
        note_what_happens(ending, directory)
        parts = (run.display, run.recorder, run.reward, run.roles, SPANS)
        for part in reversed(parts):
            ending.callback(part.close)
        SPANS.open(directory.events, process="controller")
        run.display.start(run.total_steps, done=run.step)
        with run.interruption, run.watchdog, settled():
            try:
                train_online(run)
            except Interrupted:
                run.keep_progress()
            run.recorder.settle()
    seconds = time.monotonic() - started
    curves = draw_curves(directory.metrics, directory.report)
    return _summary(run, directory, curves, seconds=seconds, steps=run.step - first)


def _summary(
    run: OnlineRun, directory: RunDirectory, curves: list[Path], *, seconds: float, steps: int
) -> Summary:
    newest = run.recorder.store.latest()
    checkpoint = directory.checkpoint(newest) if newest is not None else None
    files = {"metrics": directory.metrics, "rollouts": directory.root / "rollouts"}
    files |= {f"curve {path.stem}": path for path in curves}
    if checkpoint is not None:
        files["checkpoint"] = checkpoint
    files = {name: path for name, path in files.items() if path.exists()}
    asked = run.interruption
    how = headline(directory, asked, step=run.step - run.is_open, last_step=run.last_step)
    return Summary(
        headline=how,
        signal=asked.number,
        changes=_reached(run),
        steps=steps,
        seconds=seconds,
        files=files,
        commands=_commands(directory, checkpoint, is_whole=how == FINISHED),
    )


def _commands(
    directory: RunDirectory, checkpoint: Path | None, *, is_whole: bool
) -> tuple[str, ...]:
    """What can be done with the run now."""
    more = () if is_whole else (f"luyen train --resume {directory.root}",)
    if checkpoint is None:
        return more
    tried = ("chat", checkpoint), ("eval", checkpoint), ("export", f"{checkpoint} exported/")
    return (*more, *(f"luyen {command} {words}" for command, words in tried))


def _reached(run: OnlineRun) -> tuple[Change, ...]:
    """What the first and the last validation found; an accuracy only where both are."""
    if not run.validations:
        return ()
    first, last = ({**validated(v)} for v in (run.validations[0], run.validations[-1]))
    label = VALIDATION_REWARD if VALIDATION_REWARD in {**first, **last} else ACCURACY
    if label == VALIDATION_REWARD:
        first, last = ({label: mean_reward(v)} for v in (run.validations[0], run.validations[-1]))
    is_one = len(run.validations) == 1
    is_before = is_one and run.config.trainer.val_before_train and not run.has_validated_later
    return (
        Change(
            label=label,
            before=None if is_one and not is_before else first.get(label),
            after=None if is_before else last.get(label),
        ),
    )
