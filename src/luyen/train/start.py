"""Begin or resume a run, carry it to its end, and say what it reached."""

import time
from contextlib import ExitStack
from pathlib import Path

from luyen.base.digests import DigestFile
from luyen.base.errors import UserError
from luyen.base.garbage import settled
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint
from luyen.config.check import Report
from luyen.telemetry.curves import draw_curves
from luyen.telemetry.journal import WorkJournals
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.sinks import open_sinks
from luyen.telemetry.spans import SPANS
from luyen.telemetry.summary import Change, Summary
from luyen.train.beginning import (
    facts_of,
    find_checkpoint,
    identity,
    open_directory,
    open_run_display,
    prepare_rows,
)
from luyen.train.build import build_run
from luyen.train.build_roles import surroundings_of
from luyen.train.offline.start import run_offline
from luyen.train.online import train_online
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.recorder import Recorder, restore
from luyen.train.recovery import until_done
from luyen.train.run import OnlineRun
from luyen.train.saving import known_at, open_store, saves_aside
from luyen.train.unbuilt import refuse_unbuilt
from luyen.train.work import settings_print


def run_training(report: Report, *, trial_steps: int | None = None) -> Summary:
    """Train as the configuration says. It must have passed its check.

    With `trial_steps` the run ends after so many and leaves no checkpoint.
    """
    if not report.is_sound:
        first = next(p for p in report.problems if p.severity == "error")
        raise UserError(first.field, first.value, first.why, first.fix)
    refuse_unbuilt(report)
    if report.config.trainer.stage != "rl":
        return run_offline(report, trial_steps=trial_steps)

    def carry_out(run: OnlineRun) -> Summary:
        run.trial_steps = trial_steps
        return _carry_out(run)

    return until_done(report, prepare_online, carry_out)


def prepare_online(report: Report) -> OnlineRun:
    """A run with its directory, its files open, where its newest checkpoint left it."""
    config = report.config
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    surroundings = surroundings_of(config)
    offered = surroundings.offered if surroundings is not None else None
    data = prepare_rows(config, tokenizer, display, offered=offered)
    directory = open_directory(report, data, facts := facts_of(config, data))
    store = open_store(directory.checkpoints, config.trainer)
    resumed = find_checkpoint(report, store, directory)
    first_step = resumed.step + 1 if resumed is not None else 0
    log = open_sinks(
        config.trainer.logger,
        directory=directory,
        who=identity(report, directory),
        display=display,
        first_step=first_step,
    )
    with ExitStack() as opened:
        opened.callback(log.close)
        digests = DigestFile(directory.digests, first_step=first_step)
        opened.callback(digests.close)
        recorder = Recorder(
            directory,
            log,
            store,
            digests,
            known=known_at(resumed),
            is_async=saves_aside(config.trainer, report.plan.where),
        )
        run = build_run(report, data, tokenizer, recorder, display, surroundings)
        opened.callback(run.roles.close)
        opened.callback(run.reward.close)
        _go_on_from(resumed, run, facts)
        opened.pop_all()
    return run


def _go_on_from(resumed: Checkpoint | None, run: OnlineRun, facts: Manifest) -> None:
    """Put the run where a checkpoint left it, or at its beginning, with its journals open."""
    if resumed is None:
        _open_journals(run, facts, done=-1)
        return
    state = restore(resumed.path, run.roles)
    _open_journals(run, facts, done=state.step)
    run.restore(state)


def _open_journals(run: OnlineRun, facts: Manifest, *, done: int) -> None:
    """Work goes into journals from now on; that of steps up to `done` is not needed any more."""
    directory = run.recorder.directory
    run.recorder.journals = WorkJournals(directory.journal, run_id=directory.run_id)
    run.recorder.journals.forget(done)
    run.settings = settings_print(run.config, facts)


def _carry_out(run: OnlineRun) -> Summary:
    directory = run.recorder.directory
    SPANS.open(directory.events, process="controller")
    started, first = time.monotonic(), run.step
    run.display.start(run.total_steps, done=run.step)
    with ExitStack() as ending:
        parts = (run.display, run.recorder, run.reward, run.roles, SPANS)
        for part in reversed(parts):
            ending.callback(part.close)
        with run.interruption, run.watchdog, settled():
            train_online(run)
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
    accuracy = Change(
        label="validation accuracy",
        before=run.validations[0].get("val/accuracy") if run.validations else None,
        after=run.validations[-1].get("val/accuracy") if run.validations else None,
    )
    return Summary(
        headline="Interrupted" if run.interruption.is_wanted else "Finished",
        changes=(accuracy,) if run.validations else (),
        steps=steps,
        seconds=seconds,
        files=files,
        commands=(
            f"luyen chat {checkpoint}",
            f"luyen eval {checkpoint}",
            f"luyen export {checkpoint} exported/",
        )
        if checkpoint is not None
        else (),
    )
