"""A pipeline: stages in one YAML file, each a run's configuration, all checked up front.

Keys that all stages share are below `defaults`; a stage adds a file, keys of its own, or both. Each
stage gets a run directory of its own, `<project>/<stage>` unless it says otherwise.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import expanded, read_text
from luyen.config.check import Report, check_tree, no_row_is_read
from luyen.config.fields import all_blocks
from luyen.config.loader.load import load_trees, read_file, read_override
from luyen.config.loader.tree import ConfigTree, merge, nested
from luyen.config.loader.yaml_tree import read_items, read_tree
from luyen.config.machine import Machine
from luyen.config.named_files import refs_in, root_of, with_artifacts
from luyen.config.problem import Origin, Problem
from luyen.config.schema.run import RunConfig
from luyen.telemetry.artifact_registry import ArtifactRegistry

STAGES = "stages"
_TOP = ("name", "defaults", STAGES)
_OWN = ("name", "file", "config")
_LONGEST_NAME = 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage, with its whole configuration.

    Example:
        >>> Stage(name="sft", tree=ConfigTree(values={}, origins={})).name
        'sft'
    """

    name: str
    """How other stages refer to it."""
    tree: ConfigTree
    """Its keys, overrides included; artifacts are still names."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in the order they run.

    Example:
        >>> Pipeline(name="demo", source="demo.yaml", stages=()).problems
        ()
    """

    name: str
    """Also the project of its runs, unless a stage names one."""
    source: str
    """The file."""
    stages: tuple[Stage, ...]
    """In order."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the file itself, as opposed to the configuration of a stage."""


def is_pipeline(files: Sequence[Path]) -> bool:
    """Whether one of the files lists stages; a file that cannot be read does not."""
    return any(STAGES in _top(file).values for file in files)


def read_pipeline(files: Sequence[Path], overrides: Sequence[str]) -> Pipeline:
    """The pipeline in a file; `key=value` is for all of its stages, `STAGE.key=value` for one."""
    file = next(file for file in files if STAGES in _top(file).values)
    top = _top(file)
    problems = [*top.problems, *_odd_keys(top, _TOP, ""), *_other_files(files, file)]
    items = [] if top.problems else _items(file, top)
    listed = top.values[STAGES]
    if not items or len(items) != len(listed):
        why = "it must be a list of stages, each with a name"
        problems.append(_problem(STAGES, top.origins[STAGES], listed, why, "write `- name: sft`"))
    problems += [found for item in items for found in (*item.problems, *_wrong_with(item))]
    problems += [*_twice(items), *_named_alike(top), *_wrong_at_top(top)]
    name = str(top.values.get("name", file.stem))
    names = [str(item.values.get("name")) for item in items]
    stages: list[Stage] = []
    if not problems:
        over = [(text, _stage_of(text, names)) for text in overrides]
        stages = [_stage(name, file, top, item, over) for item in items]
    return Pipeline(name=name, source=str(file), stages=tuple(stages), problems=tuple(problems))


def _top(file: Path) -> ConfigTree:
    try:
        return read_tree(read_text(file), str(file))
    except OSError:
        return ConfigTree(values={}, origins={})


def _items(file: Path, top: ConfigTree) -> list[ConfigTree]:
    if not isinstance(top.values[STAGES], list):
        return []
    return read_items(read_text(file), str(file), STAGES)


def _stage(
    pipeline: str,
    file: Path,
    top: ConfigTree,
    item: ConfigTree,
    overrides: Sequence[tuple[str, str | None]],
) -> Stage:
    name = str(item.values["name"])
    written = item.values.get("file", [])
    paths = [written] if isinstance(written, str) else cast(list[str], written)
    shared = _below(top, "defaults")
    trees = [
        shared,
        *(read_file(file.parent / path) for path in paths),
        _names(pipeline, name, shared, item.origins["name"]),
        _below(item, "config"),
    ]
    for text, stage in overrides:
        if stage in (None, name):
            trees.append(read_override(text if stage is None else _without(text, name)))
    return Stage(name=name, tree=load_trees(trees))


def _names(pipeline: str, stage: str, shared: ConfigTree, origin: Origin) -> ConfigTree:
    """The run directory of a stage; a file that several stages read must not set it."""
    written: Any = shared.values.get("trainer")
    block = cast(dict[str, Any], written) if isinstance(written, dict) else {}
    names = {"project_name": block.get("project_name", pipeline), "experiment_name": stage}
    places = dict.fromkeys((f"trainer.{key}" for key in names), origin)
    return ConfigTree(values={"trainer": names}, origins=places)


def _below(tree: ConfigTree, name: str) -> ConfigTree:
    """The block `name` as a tree of its own."""
    head = f"{name}."
    origins = {key[len(head) :]: at for key, at in tree.origins.items() if key.startswith(head)}
    return ConfigTree(values=dict(tree.values.get(name) or {}), origins=origins)


def _stage_of(text: str, names: Sequence[str]) -> str | None:
    """The stage that an override is for; None: all of them.

    A stage may be called like a block, as `sft` is: then a block of a run must follow its name.
    """
    first, _, rest = text.lstrip("+").partition("=")[0].partition(".")
    blocks = {block.partition(".")[0] for block in all_blocks()}
    is_stage = first in names and (first not in blocks or rest.partition(".")[0] in blocks)
    return first if is_stage else None


def _without(text: str, name: str) -> str:
    return text.lstrip("+").removeprefix(f"{name}.")


def _wrong_with(item: ConfigTree) -> Iterator[Problem]:
    yield from _odd_keys(item, _OWN, f"{STAGES}.")
    name, at = item.values.get("name"), item.origins.get("name", _first(item))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = "a stage has a name of letters, digits, - and _"
        yield _problem(f"{STAGES}.name", at, name, why, "give it one, such as `name: sft`")
    for key in ("config", "file"):
        value: Any = item.values.get(key)
        is_fit = isinstance(value, dict) if key == "config" else _is_paths(value)
        if value is not None and not is_fit:
            why = "it holds keys of a run" if key == "config" else "it names YAML files"
            yield _problem(f"{STAGES}.{key}", item.origins[key], value, why, "correct the value")
    if "config" not in item.values and "file" not in item.values:
        why = "a stage says what to run"
        yield _problem(f"{STAGES}.config", at, None, why, "give it `config:` or `file:`")


def _is_paths(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, str) for one in cast(list[Any], value))
    return isinstance(value, str)


def _twice(items: Sequence[ConfigTree]) -> Iterator[Problem]:
    seen: set[str] = set()
    for item in items:
        name = str(item.values.get("name"))
        if name in seen:
            why = "two stages have this name"
            yield _problem(f"{STAGES}.name", item.origins["name"], name, why, "rename one")
        seen.add(name)


def _wrong_at_top(top: ConfigTree) -> Iterator[Problem]:
    name, shared = top.values.get("name", ""), top.values.get("defaults")
    text = str(name) if isinstance(name, str | int) else "\0"
    if len(text) > _LONGEST_NAME or not text.isprintable():
        why = "the name of a pipeline is also that of a folder"
        fix = f"use at most {_LONGEST_NAME} letters, digits, - and _"
        yield _problem("name", top.origins["name"], name, why, fix)
    if shared is not None and not isinstance(shared, dict):
        why = "it holds keys of a run, for all stages"
        yield _problem("defaults", top.origins["defaults"], shared, why, "write keys below it")


def _named_alike(top: ConfigTree) -> Iterator[Problem]:
    key = "defaults.trainer.experiment_name"
    if key in top.origins:
        why = "all stages would have one run directory"
        fix = "drop it: each stage is called by its own name"
        yield _problem(key, top.origins[key], None, why, fix)


def _odd_keys(tree: ConfigTree, known: Sequence[str], head: str) -> Iterator[Problem]:
    for name in tree.values:
        if name not in known:
            why, fix = "no such key in a pipeline", did_you_mean(name, known)
            yield _problem(f"{head}{name}", tree.origins[name], tree.values[name], why, fix)


def _other_files(files: Sequence[Path], pipeline: Path) -> Iterator[Problem]:
    for file in files:
        if file != pipeline:
            why = f"{pipeline} is a pipeline, which is given alone"
            fix = "name it as `file:` of a stage, or give overrides"
            yield _problem(str(file), Origin(source=str(file)), None, why, fix)


def _first(item: ConfigTree) -> Origin:
    return next(iter(item.origins.values()), Origin(source=STAGES))


def _problem(key: str, origin: Origin, value: Any, why: str, fix: str) -> Problem:
    return Problem(
        id="C014", severity="error", field=key, value=value, why=why, fix=fix, origin=origin
    )


# Checking a pipeline: every stage is checked before the first one runs.
#
# The output of an earlier stage does not exist yet. It is replaced by the model that the stage
# starts from, which has the same shape and tokenizer.

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
        >>> StageReport(name="sft", report=check_tree(ConfigTree(values={}, origins={}))).name
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
    row_error: Callable[[RunConfig, str], UserError | None] = no_row_is_read,
) -> list[StageReport]:
    """Check all stages, whatever is wrong with the ones before."""
    done: list[StageReport] = []
    for stage in pipeline.stages:
        check_one = partial(
            check_tree, machine=machine, missing_promises=missing_promises, row_error=row_error
        )
        done.append(_check_stage(stage, pipeline, done, check_one))
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
    check_one: Callable[[ConfigTree], Report],
) -> StageReport:
    before = {one.name: one.report.config for one in done}
    tree = with_artifacts(stage.tree, _stand_in(stage.tree, pipeline, before))
    refs = refs_in(stage.tree)
    parent = before.get(refs.get(POLICY, ""))
    if parent is not None:  # its shape is that of the model it begins from, as it was overridden
        overridden: Any = parent.actor_rollout_ref.model.override_config
        tree = merge([_override(overridden), tree])
    report = check_one(tree)
    later = {key for key, words in refs.items() if words.partition("/")[0] in before}
    later |= {OVERRIDE} if parent is not None else set()  # it stands for what will be there
    problems = [p for p in report.problems if p.id == "C013" or p.field not in later]
    # Whether a started stage still matches its configuration is checked once its inputs exist.
    problems = [p for p in problems if p.id != "S24"]
    problems += _same_place(stage, report.config, before)
    return StageReport(name=stage.name, report=replace(report, problems=tuple(problems)))


def _stand_in(
    tree: ConfigTree, pipeline: Pipeline, before: dict[str, RunConfig]
) -> Callable[[str, str], str]:
    names = [stage.name for stage in pipeline.stages]
    kinds = {name: config.trainer.stage for name, config in before.items()}

    def find(words: str, key: str) -> str:
        if "@" in words:
            return ArtifactRegistry(root_of(tree)).one(words, key).path
        name, part = demand_fit(words, key, names, kinds)
        if part == CHECKPOINT:
            return str(run_directory(before[name]) / "checkpoints")
        return before[name].actor_rollout_ref.model.path

    return find


def _override(values: dict[str, Any]) -> ConfigTree:
    return ConfigTree(
        values=nested([*OVERRIDE.split(".")], dict(values)) if values else {}, origins={}
    )


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
