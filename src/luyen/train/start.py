"""Start or resume a run, train to the end, restart after lost ranks, summarise the result."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, final

from luyen.base.errors import UserError
from luyen.base.process_setup import frozen_gc
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint
from luyen.config.check import Report
from luyen.rollout.protocol import rollout_engines
from luyen.runtime.ray.messages import RanksLost
from luyen.telemetry.callbacks import Callback
from luyen.telemetry.display import ACCURACY, VALIDATION_REWARD, mean_reward, validated
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.output import say
from luyen.telemetry.spans import SPANS, span
from luyen.telemetry.summary import FINISHED, Change, RunSummary
from luyen.train.builders.roles import tool_environment_of
from luyen.train.builders.run import build_run
from luyen.train.builders.setup import (
    collect_manifest,
    import_plugins,
    load_rows,
    load_run_tokenizer,
    open_run_display,
    refuse_running,
)
from luyen.train.loop import train_online
from luyen.train.offline.loop import OfflineRun
from luyen.train.offline.start import prepare_offline, train_and_summarise
from luyen.train.record import load_checkpoint
from luyen.train.run import OnlineRun
from luyen.train.session import StageRun, open_run, train_to_end
from luyen.train.state import first_logged_step

# Lost ranks do not end a run: everything is closed and rebuilt, and the run resumes from its newest
# checkpoint and the journal, exactly as the same command in a new process would. An offline run has
# no journal: it repeats the steps since its newest checkpoint.

AnyRun = TypeVar("AnyRun", bound=StageRun)
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
    prepare: Callable[[Report], AnyRun],
    train: Callable[[AnyRun], RunSummary],
) -> RunSummary:
    """Prepare and run; rebuild and resume after lost ranks."""
    failures = RankFailures()
    run: AnyRun | None = None
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
    report: Report, prepare: Callable[[Report], AnyRun], *, before: AnyRun | None
) -> AnyRun:
    """Prepare the run; a restart is recorded as a `recover` span in the run's events."""
    if before is None:
        return prepare(report)
    SPANS.open(before.recorder.directory.events, process="controller")
    with span("recover", step=before.step + 1):
        return prepare(report)


def run_training(
    report: Report, *, trial_steps: int | None = None, callbacks: Sequence[Callback] = ()
) -> RunSummary:
    """Train a checked configuration; `trial_steps` ends the run early, without a checkpoint."""
    report.require_sound()

    def begin(run: StageRun) -> None:
        run.limit(trial_steps)
        run.callbacks.use(callbacks)

    def train(run: OnlineRun) -> RunSummary:
        begin(run)
        return _train_and_summarise(run)

    def train_rows(run: OfflineRun) -> RunSummary:
        begin(run)
        return train_and_summarise(run)

    if report.config.trainer.stage != "rl":
        return run_with_recovery(report, prepare_offline, train_rows)
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
    facts = collect_manifest(config, data)
    with open_run(report, data, facts, display) as opened:
        run = build_run(report, data, tokenizer, opened.recorder, display, tool_env)
        opened.closing.callback(run.roles.close)
        opened.closing.callback(run.reward.close)
        _resume(opened.resumed, run, facts)
    return run


def _resume(resumed: Checkpoint | None, run: OnlineRun, facts: Manifest) -> None:
    """Restore the checkpoint, if any, and open the journals."""
    if resumed is None:
        run.open_journals(facts, done=-1)
        return
    state = load_checkpoint(resumed.path, run.roles)
    run.open_journals(facts, done=first_logged_step(state.as_json()) - 1)
    run.restore(state)


def _train_and_summarise(run: OnlineRun) -> RunSummary:
    end = train_to_end(run, partial(_train, run), parts=(run.reward, run.roles))
    directory, newest = run.recorder.directory, run.recorder.store.latest()
    checkpoint = directory.checkpoint(newest) if newest is not None else None
    files = {"metrics": directory.metrics, "rollouts": directory.root / "rollouts"}
    files |= {f"curve {path.stem}": path for path in end.curves}
    if checkpoint is not None:
        files["checkpoint"] = checkpoint
    return RunSummary(
        headline=end.headline,
        signal=run.interruption.number,
        changes=_validation_change(run),
        steps=end.steps,
        seconds=end.seconds,
        files={name: path for name, path in files.items() if path.exists()},
        commands=_commands(directory, checkpoint, is_whole=end.headline == FINISHED),
    )


def _train(run: OnlineRun) -> None:
    with frozen_gc():
        try:
            train_online(run)
        except UserError as error:
            if error.field == rollout_engines.field:  # a server is lost, and no step with it
                run.save_without_engines()
                run.recorder.flush()
            raise


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
    history = run.recorder.history
    if not history.validations:
        return ()
    ends = history.validations[0], history.validations[-1]
    first, last = ({**validated(v)} for v in ends)
    label = VALIDATION_REWARD if VALIDATION_REWARD in {**first, **last} else ACCURACY
    if label == VALIDATION_REWARD:
        first, last = ({label: mean_reward(v)} for v in ends)
    is_one = len(history.validations) == 1
    is_before = is_one and run.config.trainer.val_before_train and not history.has_validated_later
    return (
        Change(
            label=label,
            before=None if is_one and not is_before else first.get(label),
            after=None if is_before else last.get(label),
        ),
    )
