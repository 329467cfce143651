"""Every stage of a pipeline is checked before the first one runs.

What an earlier stage will make is not there yet. In its place stands the model that the stage
begins from: it has the same shape and the same tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.suggest import did_you_mean
from luyen.config.artifact_refs import refs_in, root_of, with_artifacts
from luyen.config.check import Report, check_tree
from luyen.config.machine import Machine
from luyen.config.pipeline import STAGES, Pipeline, Stage
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Tree, merge, nested
from luyen.telemetry.artifact_registry import Registry

POLICY = "actor_rollout_ref.model.path"
OVERRIDE = "actor_rollout_ref.model.override_config"
SCORER = "reward.reward_model.model_path"
RESUMED = "trainer.resume_from_path"
CHECKPOINT = "checkpoint"
_SCORER_STAGE = "reward_model"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What the check of one stage found.

    Example:
        >>> StageReport(name="sft", report=check_tree(Tree(values={}, origins={}))).name
        'sft'
    """

    name: str
    """The stage."""
    report: Report
    """Its check, with what earlier stages make taken for granted."""


def check_pipeline(
    pipeline: Pipeline,
    *,
    machine: Machine | None = None,
    missing_promises: Callable[[], tuple[str, ...]] = tuple,
) -> list[StageReport]:
    """Check all stages, whatever is wrong with the ones before."""
    done: list[StageReport] = []
    for stage in pipeline.stages:
        done.append(_check_stage(stage, pipeline, done, machine, missing_promises))
    return done


def run_directory(config: RunConfig) -> Path:
    """Where the run of a configuration keeps its files."""
    trainer = config.trainer
    root = expanded(trainer.default_local_dir)
    return root / trainer.project_name / trainer.experiment_name


def demand_fit(words: str, key: str, names: list[str], kinds: dict[str, str]) -> tuple[str, str]:
    """The stage and the part that words after `artifact:` mean; a UserError where they do not fit.

    `names` are all stages; `kinds` has `trainer.stage` of those that come before the key's own.

    Example:
        >>> demand_fit("sft/checkpoint", "trainer.resume_from_path", ["sft"], {"sft": "sft"})
        ('sft', 'checkpoint')
    """
    name, slash, part = words.partition("/")
    written = f"artifact:{words}"
    if name not in kinds:
        is_late = name in names
        why = "that stage does not come before this one" if is_late else "no stage of this name"
        fix = "put it before, or name another" if is_late else _known(name, kinds)
        raise UserError(key, written, why, fix)
    if slash and part != CHECKPOINT:
        raise UserError(
            key, written, f"a stage has no `{part}`", f"write {name} or {name}/checkpoint"
        )
    if bool(part) != (key == RESUMED):
        fix = f"write artifact:{name}/checkpoint" if key == RESUMED else f"write artifact:{name}"
        raise UserError(key, written, "a checkpoint is what a run is resumed from", fix)
    if (key == SCORER) != (kinds[name] == _SCORER_STAGE) and key in (POLICY, SCORER):
        why = f"stage {name} ({kinds[name]}) makes {_made_by(kinds[name])}"
        raise UserError(key, written, why, "name a stage that makes what this key is for")
    return name, part


def _known(name: str, kinds: dict[str, str]) -> str:
    hint = did_you_mean(name, kinds) if kinds else "it has no stage before it"
    return f"{hint}; an artifact of another run is NAME@HASH"


def _made_by(kind: str) -> str:
    return "a reward model" if kind == _SCORER_STAGE else "a policy"


def _check_stage(
    stage: Stage,
    pipeline: Pipeline,
    done: list[StageReport],
    machine: Machine | None,
    missing_promises: Callable[[], tuple[str, ...]],
) -> StageReport:
    before = {one.name: one.report.config for one in done}
    tree = with_artifacts(stage.tree, _stand_in(stage.tree, pipeline, before))
    refs = refs_in(stage.tree)
    parent = before.get(refs.get(POLICY, ""))
    if parent is not None:  # its shape is that of the model it begins from, as it was overridden
        overridden: Any = parent.actor_rollout_ref.model.override_config
        tree = merge([_override(overridden), tree])
    report = check_tree(tree, machine=machine, missing_promises=missing_promises)
    later = {key for key, words in refs.items() if words.partition("/")[0] in before}
    later |= {OVERRIDE} if parent is not None else set()  # it stands for what will be there
    problems = [p for p in report.problems if p.id == "C013" or p.field not in later]
    # Whether a stage is still the one that was begun is asked when its inputs are there.
    problems = [p for p in problems if p.id != "S24"]
    problems += _same_place(stage, report.config, before)
    return StageReport(name=stage.name, report=replace(report, problems=tuple(problems)))


def _stand_in(
    tree: Tree, pipeline: Pipeline, before: dict[str, RunConfig]
) -> Callable[[str, str], str]:
    names = [stage.name for stage in pipeline.stages]
    kinds = {name: config.trainer.stage for name, config in before.items()}

    def find(words: str, key: str) -> str:
        if "@" in words:
            return Registry(root_of(tree)).one(words, key).path
        name, part = demand_fit(words, key, names, kinds)
        if part == CHECKPOINT:
            return str(run_directory(before[name]) / "checkpoints")
        return before[name].actor_rollout_ref.model.path

    return find


def _override(values: dict[str, Any]) -> Tree:
    return Tree(values=nested([*OVERRIDE.split(".")], dict(values)) if values else {}, origins={})


def _same_place(stage: Stage, config: RunConfig, before: dict[str, RunConfig]) -> list[Problem]:
    for name, other in before.items():
        if run_directory(other).resolve() == run_directory(config).resolve():
            return [
                Problem(
                    id="C014",
                    severity="error",
                    field="trainer.experiment_name",
                    value=config.trainer.experiment_name,
                    why=f"stage {name} has the same run directory",
                    fix=f"drop it: {STAGES} are named after themselves; or choose another",
                    origin=stage.tree.origins["trainer.experiment_name"],
                )
            ]
    return []
