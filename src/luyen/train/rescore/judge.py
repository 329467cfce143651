"""Rollouts of a run, read from its files and judged by another reward. The run is not changed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.base.rundir import RunDirectory, step_of
from luyen.config.schema.run import RunConfig
from luyen.config.trust import require_trust
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.rewards.build import BuiltReward, build_reward
from luyen.rewards.step import VALIDATION, Judging, Scored
from luyen.telemetry.rollout_files import read_rollouts
from luyen.train.checkpointed import device_for, read_config
from luyen.train.learned_reward import learned_services
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.rescore.block import rescored_config
from luyen.train.rescore.results import Rescored
from luyen.train.rescore.rows import grouped, prompts_of

Watch: TypeAlias = Callable[[int, int], None]
"""Hears `(steps judged, steps to judge)`."""


def rescore(
    root: Path,
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    steps: range | None = None,
    is_validation: bool = False,
    is_trusted: bool = False,
    watch: Watch | None = None,
) -> Rescored:
    """Judge the recorded rollouts of some steps, or of all, by another reward.

    Steps are judged in order; what is normalised over time begins with the first of them. What
    cannot be judged has a fault and no score, whatever `reward.on_fault` says. A run of somebody
    else that names code is refused unless it `is_trusted`.
    """
    directory = RunDirectory.open(root)
    run = _read(directory, is_trusted=is_trusted)
    wanted = _recorded(directory, steps, is_validation=is_validation)
    config = rescored_config(directory, file, overrides)
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(run)
    prompts = prompts_of(directory, run, tokenizer, is_validation=is_validation)
    work = Judging(purpose=VALIDATION if is_validation else "rollout")
    old: list[Scored] = []
    new: list[Scored] = []
    broken = 0
    with _reward(config, tokenizer) as reward:
        for done, step in enumerate(wanted):
            if watch is not None:
                watch(done, len(wanted))
            path = directory.rollouts(step, validation=is_validation)
            # Validations are drawn as if at step 0, whatever step they belong to.
            rows = read_rollouts(path, step=None if is_validation else step)
            drawn = [row.rollout for row in rows]
            sound = [r for r in drawn if r.score is not None or r.fault is None]
            broken += len(drawn) - len(sound)
            groups = grouped(sound, prompts)
            reward.check_sources({prompt.data_source for prompt, _ in groups})
            scored = reward.judge([(p, [_unjudged(r) for r in some]) for p, some in groups], work)
            reward.advance(scored)
            old += [Scored(prompt=p, rollouts=r, seconds=(None,) * len(r)) for p, r in groups]
            new += scored
    return Rescored(
        run=str(directory.root), steps=tuple(wanted), old=tuple(old), new=tuple(new), broken=broken
    )


def _read(directory: RunDirectory, *, is_trusted: bool) -> RunConfig:
    """The configuration of the run; a UserError where it can have no rollouts."""
    require_trust(directory, is_trusted=is_trusted)
    directory.read_config()  # a changed file is found by its seal
    run = read_config([directory.config], [])
    if run.trainer.stage != "rl":
        why = f"its stage is `{run.trainer.stage}`: it learned from given rows and has no rollouts"
        raise UserError("RUN", str(directory.root), why, "give a run of the stage `rl`")
    return run


def _reward(config: RunConfig, tokenizer: Tokenizer) -> BuiltReward:
    renderer = Renderer(tokenizer, template_kwargs=config.data.apply_chat_template_kwargs)
    services = learned_services(config, renderer, None, device_for(config))
    longest = config.data.max_response_length
    return build_reward(
        config.reward,
        max_response_length=longest,
        services=services,
        require=config.sandbox.require,
    )


def _recorded(directory: RunDirectory, steps: range | None, *, is_validation: bool) -> list[int]:
    """Steps whose rollouts are there and wanted; a UserError when there is none."""
    folder = directory.rollouts(0, validation=is_validation).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    there = sorted(step for name in names if (step := step_of(name)) is not None)
    found = [step for step in there if steps is None or step in steps]
    if not there:
        why = "no rollouts are recorded there"
        raise UserError("RUN", str(folder), why, "give a run that has drawn some")
    if not found and steps is not None:
        why = f"no rollouts of these steps are recorded; there are {there[0]} to {there[-1]}"
        raise UserError("--step", f"{steps.start}:{steps.stop - 1}", why, "give others")
    return found


def _unjudged(rollout: Rollout) -> Rollout:
    """The rollout as it was before the run judged it."""
    return replace(rollout, score=None, fault=None)
