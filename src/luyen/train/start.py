"""Start or resume a run, train to the end, restart after lost ranks, summarise the result."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import final

from luyen.base.digests import DigestFile
from luyen.base.errors import UserError
from luyen.base.process import frozen_gc
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint, CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.rollout.protocol import rollout_engines
from luyen.runtime.ray.messages import RanksLost
from luyen.telemetry.curves import plot_curves
from luyen.telemetry.display import ACCURACY, VALIDATION_REWARD, Display, mean_reward, validated
from luyen.telemetry.journal import WorkJournals
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.output import say
from luyen.telemetry.sinks import open_sinks
from luyen.telemetry.spans import SPANS, span
from luyen.telemetry.summary import FINISHED, Change, RunSummary
from luyen.train.builders.roles import tool_environment_of
from luyen.train.builders.run import build_run
from luyen.train.builders.setup import (
    collect_manifest,
    find_resume_checkpoint,
    import_plugins,
    load_rows,
    load_run_tokenizer,
    open_run_display,
    refuse_running,
    run_identity,
)
from luyen.train.interrupt import Interrupted
from luyen.train.loop import train_online
from luyen.train.offline.start import run_offline
from luyen.train.record import (
    Recorder,
    load_checkpoint,
    metrics_at,
    open_store,
    saves_in_background,
)
from luyen.train.run import OnlineRun, generation_config_hash
from luyen.train.session import headline, note_run_events, open_session, release_on_error
from luyen.train.state import first_logged_step

# Lost ranks do not end a run: everything is closed and rebuilt, and the run resumes from its newest
# checkpoint and the journal, exactly as the same command in a new process would.

_MAX_FAILURES = 3
_RETRY_DELAYS_S = (1.0, 30.0)
"""Delay before each restart: a cluster may take a while to notice lost processes."""


@final
class RankFailures:
    """Counts consecutive rank losses; a step that was never reached before resets the count.

    Example:
        >>> losses = RankFailures(most=2)
        >>> losses.note(RanksLost("rank 1 is gone"), step=3)
        'rank 1 is gone (1 of 2 in a row)'
        >>> losses.note(RanksLost("rank 0 is gone"), step=4)
        'rank 0 is gone (1 of 2 in a row)'
    """

    def __init__(self, *, most: int = _MAX_FAILURES) -> None:
        self._most = most
        self._count = 0
        self._furthest = -1

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next restart."""
        return _RETRY_DELAYS_S[min(self._count, len(_RETRY_DELAYS_S)) - 1]

    def note(self, lost: RanksLost, *, step: int) -> str:
        """Count a loss after `step` finished steps; the message, or a UserError after too many."""
        self._count = 1 if step > self._furthest else self._count + 1
        self._furthest = max(step, self._furthest)
        if self._count >= self._most:
            raise stopped(lost, f"this happened {self._count} times in a row after step {step}")
        return f"{lost} ({self._count} of {self._most} in a row)"


def stopped(lost: RanksLost, why_now: str) -> UserError:
    """The error that ends the run; it can be resumed."""
    fix = (
        "look at the memory and the logs of its node; luyen train --resume RUN goes on from the "
        "newest checkpoint and the journal"
    )
    return UserError("trainer.n_gpus_per_node", "ranks", f"{lost}; {why_now}", fix)


def resume_report(report: Report) -> Report:
    """The report of the same run, set to resume.

    A run that started from another run's checkpoint does so again until it has its own.
    """
    mode = report.config.trainer.resume_mode
    if mode != "disable":
        return replace(report, goes_on=True)
    trainer = report.config.trainer.model_copy(update={"resume_mode": "auto"})
    return replace(report, config=report.config.model_copy(update={"trainer": trainer}))


def run_with_recovery(
    report: Report,
    prepare: Callable[[Report], OnlineRun],
    train: Callable[[OnlineRun], RunSummary],
) -> RunSummary:
    """Prepare and run; rebuild and resume after lost ranks."""
    failures = RankFailures()
    run: OnlineRun | None = None
    while True:
        try:
            run = _prepare(report, prepare, before=run)
            return train(run)
        except RanksLost as lost:
            if run is not None and run.interruption.is_wanted:
                raise stopped(lost, "the run was asked to end") from lost
            message = failures.note(lost, step=run.step if run is not None else 0)
            say(f"{message}; beginning again from the newest checkpoint")
            report = resume_report(report)
            time.sleep(failures.pause_s)


def _prepare(
    report: Report, prepare: Callable[[Report], OnlineRun], *, before: OnlineRun | None
) -> OnlineRun:
    """Prepare the run; a restart is recorded as a `recover` span in the run's events."""
    if before is None:
        return prepare(report)
    SPANS.open(before.recorder.directory.events, process="controller")
    with span("recover", step=before.step + 1):
        return prepare(report)


def run_training(report: Report, *, trial_steps: int | None = None) -> RunSummary:
    """Train a checked configuration; `trial_steps` ends the run early, without a checkpoint."""
    report.require_sound()
    if report.config.trainer.stage != "rl":
        return run_offline(report, trial_steps=trial_steps)

    def train(run: OnlineRun) -> RunSummary:
        run.trial_steps = trial_steps
        return _train_to_end(run)

    return run_with_recovery(report, prepare_online, train)


def prepare_online(report: Report) -> OnlineRun:
    """Build a run, open its directory and files, and restore its newest checkpoint."""
    config = report.config
    refuse_running(report)
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    tool_env = tool_environment_of(config)
    offered = tool_env.offered if tool_env is not None else None
    data = load_rows(config, tokenizer, display, offered=offered)
    session = open_session(report, data, facts := collect_manifest(config, data))
    directory = session.directory
    with ExitStack() as opened:
        release_on_error(opened, session)
        store = open_store(directory.checkpoints, config.trainer)
        resumed = find_resume_checkpoint(report, store, directory)
        recorder = _open_recorder(report, directory, store, resumed, display, opened)
        run = build_run(report, data, tokenizer, recorder, display, tool_env)
        opened.callback(run.roles.close)
        opened.callback(run.reward.close)
        _resume(resumed, run, facts)
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
    opened.callback(log.close)
    digests = DigestFile(directory.digests, first_step=first_step)
    opened.callback(digests.close)
    is_async = saves_in_background(trainer, report.plan.where)
    return Recorder(
        directory, log, store, digests, last_metrics=metrics_at(resumed), is_async=is_async
    )


def _resume(resumed: Checkpoint | None, run: OnlineRun, facts: Manifest) -> None:
    """Restore the checkpoint, if any, and open the journals."""
    if resumed is None:
        _open_journals(run, facts, done=-1)
        return
    state = load_checkpoint(resumed.path, run.roles)
    _open_journals(run, facts, done=first_logged_step(state.as_json()) - 1)
    run.restore(state)


def _open_journals(run: OnlineRun, facts: Manifest, *, done: int) -> None:
    """Open the journals; those of steps up to `done` are dropped."""
    directory = run.recorder.directory
    run.recorder.journals = WorkJournals(directory.journal, run_id=directory.run_id)
    run.recorder.journals.forget(done)
    run.config_hash = generation_config_hash(run.config, facts)


def _train_to_end(run: OnlineRun) -> RunSummary:
    directory = run.recorder.directory
    started, first = time.monotonic(), run.step
    with ExitStack() as ending:
        note_run_events(ending, directory)
        parts = (run.display, run.recorder, run.reward, run.roles, SPANS)
        for part in reversed(parts):
            ending.callback(part.close)
        SPANS.open(directory.events, process="controller")
        run.display.start(run.total_steps, done=run.step)
        with run.interruption, run.watchdog, frozen_gc():
            try:
                train_online(run)
            except Interrupted:
                run.save_progress()
            except UserError as error:
                if error.field == rollout_engines.field:  # a server is lost, and no step with it
                    run.save_step_start()
                    run.recorder.flush()
                raise
            run.recorder.flush()
    seconds = time.monotonic() - started
    curves = plot_curves(directory.metrics, directory.report)
    return _summary(run, directory, curves, seconds=seconds, steps=run.step - first)


def _summary(
    run: OnlineRun, directory: RunDirectory, curves: list[Path], *, seconds: float, steps: int
) -> RunSummary:
    newest = run.recorder.store.latest()
    checkpoint = directory.checkpoint(newest) if newest is not None else None
    files = {"metrics": directory.metrics, "rollouts": directory.root / "rollouts"}
    files |= {f"curve {path.stem}": path for path in curves}
    if checkpoint is not None:
        files["checkpoint"] = checkpoint
    files = {name: path for name, path in files.items() if path.exists()}
    interruption = run.interruption
    how = headline(
        directory, interruption, step=run.step - run.awaits_validation, last_step=run.last_step
    )
    return RunSummary(
        headline=how,
        signal=interruption.number,
        changes=_validation_change(run),
        steps=steps,
        seconds=seconds,
        files=files,
        commands=_commands(directory, checkpoint, is_whole=how == FINISHED),
    )


def _commands(
    directory: RunDirectory, checkpoint: Path | None, *, is_whole: bool
) -> tuple[str, ...]:
    """Commands to suggest for the finished run."""
    more = () if is_whole else (f"luyen train --resume {directory.root}",)
    if checkpoint is None:
        return more
    tried = ("chat", checkpoint), ("eval", checkpoint), ("export", f"{checkpoint} exported/")
    return (*more, *(f"luyen {command} {words}" for command, words in tried))


def _validation_change(run: OnlineRun) -> tuple[Change, ...]:
    """First and last validation: mean reward, or accuracy where all rewards are 0 or 1."""
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
