"""Start or resume an offline run (SFT, preference, reward model, distillation)."""

from functools import partial
from typing import Any

from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.offline import OfflineData, build_offline_data
from luyen.data.tokenizer import Tokenizer
from luyen.telemetry.display import Display
from luyen.telemetry.progress import explain_if_slow
from luyen.telemetry.summary import Change, RunSummary
from luyen.train.builders.run import total_steps
from luyen.train.builders.setup import (
    collect_manifest,
    import_plugins,
    load_run_tokenizer,
    open_run_display,
    refuse_running,
)
from luyen.train.offline.build import STAGES, build_offline_roles, build_stage
from luyen.train.offline.loop import OfflineRun, OfflineSchedule, train_offline
from luyen.train.record import require_stage
from luyen.train.session import open_run, train_to_end


def prepare_offline(report: Report) -> OfflineRun:
    """Build a run, open its directory and files, and restore its newest checkpoint."""
    config = report.config
    refuse_running(report)
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    display = open_run_display(config)
    data = offline_rows(config, tokenizer, display)
    facts = collect_manifest(config, data.given)
    with open_run(report, data.given, facts, display) as opened:
        roles = build_offline_roles(config, tokenizer, report.plan.where)
        opened.closing.callback(roles.close)
        stage = build_stage(config, data, tokenizer, roles, display, directory=opened.directory)
        steps = total_steps(config, len(data.train))
        schedule = OfflineSchedule(config=config, data=data.given, stage=stage, total_steps=steps)
        run = OfflineRun(schedule, opened.recorder, display)
        if opened.resumed is not None:
            loop = load_state(opened.resumed.path, "loop")
            require_stage(loop, config.trainer.stage, opened.resumed.path)
            schedule.restore(opened.resumed.path)
            run.restore_progress(loop)
    return run


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


def train_and_summarise(run: OfflineRun) -> RunSummary:
    """Train to the end, and close everything."""
    end = train_to_end(run, partial(train_offline, run), parts=(run.roles,))
    directory = run.recorder.directory
    return RunSummary(
        headline=end.headline,
        signal=run.interruption.number,
        changes=_changes(run),
        steps=end.steps,
        seconds=end.seconds,
        files={"metrics": directory.metrics, "checkpoints": directory.checkpoints},
        commands=_commands(run, run.recorder.store.latest()),
    )


def _changes(run: OfflineRun) -> tuple[Change, ...]:
    """First and last value of the first goal metric that was measured."""
    goal = next((g for g in run.stage.goals if g.metric in run.last), None)
    if goal is None:
        return ()
    before, after = run.first.get(goal.metric), run.last[goal.metric]
    return (Change(label=goal.label, before=before, after=after),)


def _commands(run: OfflineRun, newest: int | None) -> tuple[str, ...]:
    is_cut = not run.is_recorded or run.step < run.last_step
    more = (f"luyen train --resume {run.recorder.directory.root}",) if is_cut else ()
    if newest is None:
        return more
    checkpoint = run.recorder.directory.checkpoint(newest)
    chat = () if run.config.trainer.stage == "reward_model" else (f"luyen chat {checkpoint}",)
    return (*more, *chat, f"luyen export {checkpoint} exported/")
