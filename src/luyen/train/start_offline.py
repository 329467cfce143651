"""Begin or resume a supervised run and carry it to its end."""

import time

from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.tokenizer import Tokenizer
from luyen.engine.optim import MasterAdamW
from luyen.engine.supervised import SupervisedEngine
from luyen.models.load import load_policy
from luyen.telemetry.curves import draw_curves
from luyen.telemetry.display import Display
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
from luyen.train.build import total_steps
from luyen.train.build_roles import actor_passes, choose_threads
from luyen.train.offline import OfflineRun, train_offline
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.saving import known_at, open_store, saves_aside
from luyen.train.supervised_files import SupervisedFiles, restore_supervised


def run_supervised(report: Report, *, trial_steps: int | None = None) -> Summary:
    """Learn from the conversations that are given."""
    config = report.config
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    data = prepare_rows(config, tokenizer, display)
    directory = open_directory(report, data, facts_of(config, data))
    store = open_store(directory.checkpoints, config.trainer)
    resumed = find_checkpoint(report, store, directory)
    log = open_sinks(
        config.trainer.logger,
        directory=directory,
        who=identity(report, directory),
        display=display,
        first_step=resumed.step + 1 if resumed is not None else 0,
    )
    run = OfflineRun(
        config,
        data,
        build_engine(config, tokenizer, report.plan.where.device),
        SupervisedFiles(
            directory,
            log,
            store,
            known=known_at(resumed),
            is_async=saves_aside(config.trainer, report.plan.where),
        ),
        total_steps=total_steps(config, len(data.train.prompts)),
    )
    run.trial_steps = trial_steps
    if resumed is not None:
        run.step = run.saved = restore_supervised(resumed.path, run.engine)
    display.start(run.total_steps, done=run.step)
    return _carry_out(run, display)


def _carry_out(run: OfflineRun, display: Display) -> Summary:
    directory = run.files.directory
    SPANS.open(directory.events, process="controller")
    started, first = time.monotonic(), run.step
    try:
        with run.interruption, run.watchdog:
            train_offline(run)
            run.files.settle()
    finally:
        display.close()
        run.files.close()
        SPANS.close()
    draw_curves(directory.metrics, directory.report)
    newest = run.files.store.latest()
    return Summary(
        headline="Interrupted" if run.interruption.is_wanted else "Finished",
        changes=(
            Change(label="negative log-likelihood", before=run.first_nll, after=run.last_nll),
        ),
        steps=run.step - first,
        seconds=time.monotonic() - started,
        files={"metrics": directory.metrics, "checkpoints": directory.checkpoints},
        commands=(f"luyen chat {directory.checkpoint(newest)}",) if newest is not None else (),
    )


def build_engine(config: RunConfig, tokenizer: Tokenizer, device: str) -> SupervisedEngine:
    """The policy with its optimizer."""
    arr = config.actor_rollout_ref
    policy = load_policy(
        arr.model, device=device, vocabulary=tokenizer.size, seed=config.trainer.seed
    )
    choose_threads(policy)
    return SupervisedEngine(
        policy,
        MasterAdamW(policy.parameters(), arr.actor.optim),
        actor_passes(arr.actor),
        aggregation=arr.actor.loss_agg_mode or "token-mean",
    )
