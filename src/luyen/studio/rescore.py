"""Score the recorded rollouts of a run with another reward; the run is not changed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout
from luyen.base.rundir import RunDirectory, step_of
from luyen.config.check import check_tree
from luyen.config.loader.load import load, read_override
from luyen.config.loader.tree import ConfigTree, merge, removed
from luyen.config.named_files import with_artifacts
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.trust import require_trust
from luyen.data.build import TrainData, build_data
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer
from luyen.pipeline.policy_loading import device_for, read_config
from luyen.rewards.build import BuiltReward, build_reward
from luyen.rewards.scoring import VALIDATION, ScoredGroup, ScoreJournal
from luyen.studio.rescore_results import RescoreResult
from luyen.telemetry.rollout_files import read_rollouts
from luyen.train.builders.reward import reward_model_services
from luyen.train.builders.roles import tool_environment_of
from luyen.train.builders.setup import import_plugins, load_run_tokenizer

# The configuration of the new reward: from a file, or that of the run, with overrides.

_BLOCK = "reward"
_OPTION = "--reward"


def rescored_config(
    directory: RunDirectory, file: Path | None, overrides: Sequence[str]
) -> RunConfig:
    """The configuration of a run with another reward block, validated.

    The `reward` block of the file replaces that of the run completely; without a file the block of
    the run is used. `overrides` apply to either. Plugins of both are registered.
    """
    run = with_artifacts(load([directory.config], []))
    tree = run if file is None else _with_block(run, with_artifacts(load([file], [])), file)
    tree = merge([tree, *(_override(text) for text in overrides)])
    known = {(p.id, p.field) for p in check_tree(run, starts_a_run=False).problems}
    report = check_tree(tree, starts_a_run=False)
    for problem in report.problems:
        is_old = (problem.id, problem.field) in known and not problem.field.startswith(_BLOCK)
        if problem.severity == "error" and not is_old:
            raise _refused(problem)
    return report.config


def _with_block(run: ConfigTree, other: ConfigTree, file: Path) -> ConfigTree:
    for problem in other.problems:
        if problem.severity == "error":
            raise _refused(problem)
    block = other.values.get(_BLOCK)
    if not isinstance(block, dict) or not block:
        why = "it has no `reward` block"
        raise UserError(_OPTION, str(file), why, "write `reward:` and its keys into it")
    origins = {k: o for k, o in run.origins.items() if not _is_of_reward(k)}
    origins |= {k: o for k, o in other.origins.items() if _is_of_reward(k)}
    plugins = [*_plugins(run), *_plugins(other)]
    values = {**removed(run.values, [_BLOCK]), _BLOCK: block}
    values["trainer"] = {**run.values.get("trainer", {}), "plugins": list(dict.fromkeys(plugins))}
    return replace(run, values=values, origins=origins)


def _plugins(tree: ConfigTree) -> list[str]:
    named = tree.values.get("trainer", {}).get("plugins") or []
    return [named] if isinstance(named, str) else list(named)


def _override(text: str) -> ConfigTree:
    found = read_override(text)
    if found.problems:
        raise _refused(found.problems[0])
    strange = [key for key in found.origins if not _is_of_reward(key)]
    if strange:
        why = "only the reward is another; rollouts, rows and models are those of the run"
        raise UserError(strange[0], text, why, "change keys of the block `reward`")
    return found


def _is_of_reward(key: str) -> bool:
    return key.partition(".")[0] == _BLOCK


def _refused(problem: Problem) -> UserError:
    return UserError(problem.field, problem.value, problem.why, problem.fix)


# The prompts of recorded rollouts: rollout files hold tokens, while rewards read dataset rows.


def prompts_of(
    directory: RunDirectory, config: RunConfig, tokenizer: Tokenizer, *, is_validation: bool
) -> dict[str, Prompt]:
    """The dataset rows of a run by uid, offered tools included.

    A UserError when the files have changed since the run: ground truths might differ silently.
    """
    around = tool_environment_of(config)
    offered = around.offered if around is not None else None
    data = build_data(config.data, tokenizer=tokenizer, seed=config.trainer.seed, offered=offered)
    split = "validation" if is_validation else "train"
    field = "data.val_files" if is_validation else "data.train_files"
    found = data.validation if is_validation else data.train
    if found is None:
        raise UserError(field, None, "the run measured on no rows", "leave out --validation")
    files = config.data.val_files if is_validation else config.data.train_files
    if found.fingerprint not in _known(directory, split):
        why = "its rows are not those that the run began or was resumed with"
        raise UserError(field, ", ".join(files), why, "put the files back as they were")
    return {prompt.uid: prompt for prompt in _rows(data, is_validation=is_validation)}


def grouped(
    rollouts: Sequence[Rollout], prompts: dict[str, Prompt]
) -> list[tuple[Prompt, tuple[Rollout, ...]]]:
    """Rollouts by group, in the order of their keys, with their prompts."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.key):
        groups.setdefault(str(rollout.group), []).append(rollout)
    found: list[tuple[Prompt, tuple[Rollout, ...]]] = []
    for name, some in groups.items():
        prompt = prompts.get(some[0].group.uid)
        if prompt is None:
            why = "no row of the run's files has the uid of its prompt"
            fix = "put back tools, template and filters of data as they were"
            raise UserError("rollout", name, why, fix)
        found.append((prompt, tuple(some)))
    return found


def _rows(data: TrainData, *, is_validation: bool) -> Sequence[Prompt]:
    if not is_validation:
        return data.train.prompts
    return data.validation.prompts if data.validation is not None else ()


def _known(directory: RunDirectory, split: str) -> set[str]:
    """Fingerprints of the rows that the run was begun and resumed with."""
    facts = [directory.read_manifest()]
    facts += [noted["changed"] for noted in directory.read_resumptions()]
    return {found for f in facts if (found := f.get("datasets", {}).get(split)) is not None}


Watch: TypeAlias = Callable[[int, int], None]
"""Progress callback: `(scored steps, total steps)`."""


def rescore(
    root: Path,
    *,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    steps: range | None = None,
    is_validation: bool = False,
    is_trusted: bool = False,
    watch: Watch | None = None,
) -> RescoreResult:
    """Score the recorded rollouts of some or all steps with another reward.

    Steps are scored in order; running statistics start with the first of them. A rollout that
    cannot be scored gets a fault and no score, regardless of `reward.on_fault`. A run that names
    code and was not made on this machine is refused unless `is_trusted`.
    """
    directory = RunDirectory.open(root)
    run = _read(directory, is_trusted=is_trusted)
    wanted = _recorded(directory, steps, is_validation=is_validation)
    config = rescored_config(directory, file, overrides)
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(run)
    prompts = prompts_of(directory, run, tokenizer, is_validation=is_validation)
    work = ScoreJournal(purpose=VALIDATION if is_validation else "rollout")
    old: list[ScoredGroup] = []
    new: list[ScoredGroup] = []
    broken = 0
    with _reward(config, tokenizer) as reward:
        for done, step in enumerate(wanted):
            if watch is not None:
                watch(done, len(wanted))
            path = directory.rollouts(step, validation=is_validation)
            # Rollouts of validations carry step 0.
            rows = read_rollouts(path, step=None if is_validation else step)
            rollouts = [row.rollout for row in rows]
            valid = [r for r in rollouts if r.score is not None or r.fault is None]
            broken += len(rollouts) - len(valid)
            groups = grouped(valid, prompts)
            reward.check_sources({prompt.data_source for prompt, _ in groups})
            scored = reward.score([(p, [_unscored(r) for r in some]) for p, some in groups], work)
            reward.advance(scored)
            old += [ScoredGroup(prompt=p, rollouts=r, seconds=(None,) * len(r)) for p, r in groups]
            new += scored
    return RescoreResult(
        run=str(directory.root), steps=tuple(wanted), old=tuple(old), new=tuple(new), broken=broken
    )


def _read(directory: RunDirectory, *, is_trusted: bool) -> RunConfig:
    """The configuration of the run; a UserError where it can have no rollouts."""
    require_trust(directory, is_trusted=is_trusted)
    directory.read_config()  # verifies the checksum
    run = read_config([directory.config], [])
    if run.trainer.stage != "rl":
        why = f"its stage is `{run.trainer.stage}`: it learned from given rows and has no rollouts"
        raise UserError("RUN", str(directory.root), why, "give a run of the stage `rl`")
    return run


def _reward(config: RunConfig, tokenizer: Tokenizer) -> BuiltReward:
    renderer = Renderer(tokenizer, template_kwargs=config.data.apply_chat_template_kwargs)
    services = reward_model_services(config, renderer, None, device_for(config))
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
        raise UserError("RUN", str(folder), why, "give a run that has generated some")
    if not found and steps is not None:
        why = f"no rollouts of these steps are recorded; there are {there[0]} to {there[-1]}"
        raise UserError("--step", f"{steps.start}:{steps.stop - 1}", why, "give other steps")
    return found


def _unscored(rollout: Rollout) -> Rollout:
    """The rollout before scoring."""
    return replace(rollout, score=None, fault=None)
