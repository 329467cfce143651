"""`check`: every problem of a configuration at once, the plan, and what was not checked."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.input_files import expanded, read_text
from luyen.base.process_setup import version_of
from luyen.config.environments import read_environments
from luyen.config.fields import all_fields
from luyen.config.loader.load import load
from luyen.config.loader.parse import masked_problems, parse, remember_secrets
from luyen.config.loader.tree import ConfigTree, origin_of
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.machine import Machine, this_machine
from luyen.config.memory import MemoryPlan, plan_memory
from luyen.config.model_folder.config_json import ModelShape, read_shape
from luyen.config.model_folder.files import folder_of, looks_local
from luyen.config.named_files import python_files, with_artifacts
from luyen.config.plan import (
    BatchPlan,
    Placement,
    has_teacher,
    needs_reference,
    plan_batches,
    plan_placement,
    starts_servers,
    uses_running_servers,
)
from luyen.config.plugins import PluginRegistry, read_plugins
from luyen.config.problem import DEFAULT, Origin, Problem
from luyen.config.resume import default_run_name
from luyen.config.reward_components import nodes, read_components
from luyen.config.rules.all import RULES
from luyen.config.rules.rule import RuleContext, value_at
from luyen.config.schema.run import RunConfig

_ORDER = {"error": 0, "warning": 1, "note": 2}
_MOST_FINDINGS = 100
"""Findings of one rule that are listed."""
_UNREAD = ("C001", "C003")
"""Problems that leave out what a file says; rules would then speak about its absence."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the run will do, in numbers.

    Example:
        >>> report = check([], ["data.train_files=arithmetic://sum"])
        >>> report.plan.batch.prompts
        1024
    """

    batch: BatchPlan
    """From prompts to optimizer steps."""
    where: Placement
    """Device, runtime and roles."""
    shape: ModelShape | None
    """The model's sizes; None when its config is not on this machine."""
    memory: MemoryPlan | None
    """Memory of each phase; None without a shape."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `check` found.

    Example:
        >>> check([], ["data.train_files=arithmetic://sum", "trainer.nnodez=2"]).problems[0].fix
        'did you mean `trainer.nnodes`?'
    """

    problems: tuple[Problem, ...]
    """Errors first, then warnings, then notes."""
    config: RunConfig
    """The configuration; invalid values are replaced by their defaults."""
    origins: dict[str, Origin]
    """Where each key was written."""
    plan: Plan
    """What the run will do."""
    goes_on: bool = False
    """Whether checkpoints of the run's own come before `trainer.resume_from_path`."""

    @property
    def is_sound(self) -> bool:
        """Whether a run may start."""
        return all(problem.severity != "error" for problem in self.problems)

    def require_sound(self) -> None:
        """A UserError for the first of the errors, where there are any."""
        for problem in self.problems:
            if problem.severity == "error":
                raise UserError(problem.field, problem.value, problem.why, problem.fix)

    @property
    def is_whole(self) -> bool:
        """Whether every file was read; otherwise the plan is not that of the run."""
        return all(problem.id not in _UNREAD for problem in self.problems)


def is_installed(package: str) -> bool:
    """Whether a package, or a module in one, could be imported here, without importing it."""
    root, *inner = package.split(".")
    found, name = importlib.util.find_spec(root), root
    for part in inner:
        name = f"{name}.{part}"
        places = None if found is None else found.submodule_search_locations
        found = None if places is None else PathFinder.find_spec(name, places)
    return found is not None


def no_row_is_read(config: RunConfig, address: str) -> UserError | None:
    """No error about the rows of a file, of which none is read."""
    del config, address


def check(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    installed: Callable[[str], bool] = is_installed,
    versions: Callable[[str], tuple[int, int] | None] = version_of,
    missing_promises: Callable[[], tuple[str, ...]] = tuple,
    row_error: Callable[[RunConfig, str], UserError | None] = no_row_is_read,
    starts_a_run: bool = True,
) -> Report:
    """Load, parse, apply every rule and make the plan. Nothing is written, no model is loaded.

    Where no run is to start, a run of the same name that is there does not matter. Rows are read
    by `row_error` alone (`luyen.data.first_rows`).
    """
    tree = with_artifacts(load(files, overrides, below=default_run_name(files)))
    return check_tree(
        tree,
        machine=machine,
        installed=installed,
        versions=versions,
        missing_promises=missing_promises,
        row_error=row_error,
        starts_a_run=starts_a_run,
    )


def check_tree(
    tree: ConfigTree,
    *,
    machine: Machine | None = None,
    installed: Callable[[str], bool] = is_installed,
    versions: Callable[[str], tuple[int, int] | None] = version_of,
    missing_promises: Callable[[], tuple[str, ...]] = tuple,
    row_error: Callable[[RunConfig, str], UserError | None] = no_row_is_read,
    starts_a_run: bool = True,
) -> Report:
    """The same for a configuration that is loaded already, with no artifact in it left to find."""
    parsed = parse(tree)
    config = parsed.config
    here = machine or this_machine()
    known, broken = read_plugins(config.trainer.plugins)
    estimator = known.estimators.get(config.algorithm.adv_estimator)
    where = plan_placement(config, here, estimator)
    plan = _plan(config, known, where, here)
    situation = RuleContext(
        config=config,
        written=frozenset(tree.origins),
        known=known,
        broken_plugins=broken,
        machine=here,
        where=where,
        batch=plan.batch,
        memory=plan.memory,
        installed=installed,
        versions=versions,
        missing_promises=missing_promises,
        row_error=row_error,
    )
    remember_secrets(config)
    found = [*tree.problems, *masked_problems(tree), *parsed.problems]
    wrong = {problem.field for problem in found}
    found += [p for p in _not_yet(config, tree) if p.field not in wrong]
    if not any(problem.id in _UNREAD for problem in found):
        objections = [p for p in _broken_rules(situation, tree) if p.field not in wrong]
        found += [p for p in objections if starts_a_run or p.id not in _STARTING]
    found.sort(key=lambda problem: _ORDER[problem.severity])
    return Report(problems=tuple(found), config=config, origins=tree.origins, plan=plan)


def _plan(config: RunConfig, known: PluginRegistry, where: Placement, machine: Machine) -> Plan:
    batch = plan_batches(config, world_size=where.world_size, losses=known.preference_losses)
    shape = read_shape(config.actor_rollout_ref.model)
    memory = plan_memory(config, shape, batch, where, machine) if shape else None
    return Plan(batch=batch, where=where, shape=shape, memory=memory)


def _not_yet(config: RunConfig, tree: ConfigTree) -> Iterator[Problem]:
    """Keys whose reader is not built yet, and keys with a single possible value."""
    for path, info in all_fields().items():
        value = value_at(config, path)
        if value == info.default or (info.awaits is None and info.only is None):
            continue
        if info.awaits is not None:
            rule, why = "C009", f"nothing reads it yet: it belongs to {info.awaits}"
        else:
            rule, why = "C010", info.only or ""
        yield Problem(
            id=rule,
            severity="error",
            field=path,
            value=value,
            why=why,
            fix=f"drop the line, or set it to {info.default!r}",
            origin=origin_of(path, tree.origins),
        )


_STARTING = ("S07", "S08", "S24")
"""Rules about a run that is there when another is to start."""
_OFFLINE = ("A13", "A14", "D", "F", "G", "H", "M", "N", "S", "Y", "B05", "B06", "B07", "P02")
"""Rules that also apply to offline runs; all other rules are about rollouts and rewards."""


def _applies(rule: str, stage: str) -> bool:
    return stage == "rl" or rule.startswith(_OFFLINE)


def _broken_rules(s: RuleContext, tree: ConfigTree) -> Iterator[Problem]:
    for rule in RULES.values():
        if not _applies(rule.id, s.config.trainer.stage):
            continue
        found = list(islice(rule.find(s), _MOST_FINDINGS + 1))
        if len(found) > _MOST_FINDINGS:
            more = f"and more like this, after {_MOST_FINDINGS}"
            found[-1] = replace(found[-1], why=f"{found[-1].why} ({more})")
        for finding in found:
            yield Problem(
                id=rule.id,
                severity=rule.severity,
                field=finding.field,
                value=value_at(s.config, finding.field),
                why=finding.why,
                fix=finding.fix,
                origin=tree.origins.get(finding.field, DEFAULT),
            )


# What `check` does not run, query or read; problems there only show in training.

_TURNS = "actor_rollout_ref.rollout.multi_turn"


def unchecked_parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Key, and what was not done with what it names; only what this run would use.

    Example:
        >>> list(unchecked_parts(RunConfig()))
        []
    """
    is_online = config.trainer.stage == "rl"
    for key, path in python_files(config):
        if is_online or not key.startswith(("reward.", _TURNS)):
            yield key, f"{path} is not imported: what it does then, or when it is called"
    if is_online:
        yield from _unchecked_judges(config)
        yield from _unchecked_environments(config)
        yield from _unchecked_servers(config)
    yield from _unchecked_models(config)
    for field, paths in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for path in paths:
            if "://" not in path or path.startswith("hf://"):
                few = "not read" if "://" in path else "not read beyond the first"
                yield field, f"the rows of {path} are {few}"


def _unchecked_judges(config: RunConfig) -> Iterator[tuple[str, str]]:
    for path, node in nodes(read_components(config.reward)[0]):
        if node.judge is not None:
            yield f"reward.components.{path}", f"the judge at {node.judge.base_url} is not queried"


def _unchecked_servers(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Servers of a built-in engine that run already, or that another program is to start."""
    rollout, block = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if uses_running_servers(config):
        yield f"{block}.server_urls", f"{', '.join(rollout.server_urls)}: not asked"
    elif starts_servers(config) and rollout.server.python is not None:
        python = rollout.server.python
        yield f"{block}.server.python", f"whether {python} has {rollout.name} is not looked up"


def _unchecked_environments(config: RunConfig) -> Iterator[tuple[str, str]]:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if not multi_turn.enable:
        return
    for name, choice in read_environments(multi_turn)[0].items():
        if choice.kind != "user":
            yield f"{_TURNS}.environments.{name}", "the environment is not created"
    for key, path in (
        ("tool_config_path", multi_turn.tool_config_path),
        ("interaction_config_path", multi_turn.interaction_config_path),
    ):
        for words in _named_in(path):
            yield f"{_TURNS}.{key}", words


def _named_in(path: str | None) -> Iterator[str]:
    """Classes and servers that a list of tools or users names."""
    if path is None:
        return
    try:
        tree: Any = read_tree(read_text(expanded(path)), path).values
    except (OSError, UserError):
        return  # T05 and T12 say why
    for name, value in _leaves(tree):
        if name == "class_name":
            yield f"the class {value} is not imported"
        elif name in ("command", "url"):
            yield f"the server {value} is not started or queried"


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    entries = cast(Mapping[str, Any], tree).items() if isinstance(tree, Mapping) else ()
    for name, value in entries:
        yield name, value
        yield from _leaves(value)
    for value in cast(list[Any], tree) if isinstance(tree, list) else ():
        yield from _leaves(value)


def _unchecked_models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Models of the hub that are not on this machine."""
    arr, reward_model = config.actor_rollout_ref, config.reward.reward_model
    used = {
        "actor_rollout_ref.model.path": arr.model.path,
        "actor_rollout_ref.model.tokenizer_path": arr.model.tokenizer_path,
        "actor_rollout_ref.ref.path": arr.ref.path if needs_reference(config) else None,
        "critic.model.path": config.critic.model.path,
        "distill.teacher_path": config.distill.teacher_path if has_teacher(config) else None,
        "reward.reward_model.model_path": reward_model.model_path if reward_model.enable else None,
    }
    for key, path in used.items():
        if path is not None and not looks_local(path) and folder_of(path) is None:
            yield key, f"{path} is not on this machine: its files are not looked at"


# Batch arithmetic in words.


def offline_lines(plan: BatchPlan) -> list[tuple[str, str]]:
    """The arithmetic of a stage that learns from given rows, for people."""
    each = plan.samples_per_prompt
    sequences = f"{plan.prompts} rows x {each} sequence{'' if each == 1 else 's'} = {plan.rollouts}"
    micros = f"about {plan.micro_batches} of at most {plan.micro_batch_tokens} tokens"
    tokens = f"at most {plan.tokens} a step, {plan.longest_sequence} a sequence"
    return [
        ("sequences", sequences),
        ("micro-batches", f"{micros} on each device"),
        ("optimizer steps", "1 a step"),
        ("tokens", tokens),
        ("steps", str(plan.total_steps or "as many as the rows and total_epochs make")),
    ]


def batch_lines(plan: BatchPlan) -> list[tuple[str, str]]:
    """The arithmetic as label and sentence, for people."""
    each = plan.samples_per_prompt
    samples = f"{plan.prompts} prompts x {each} sample{'' if each == 1 else 's'} = {plan.rollouts}"
    minis = f"{plan.mini_batches} x {plan.mini_batch_rollouts} rollouts"
    micros = f"about {plan.micro_batches} of at most {plan.micro_batch_tokens} tokens"
    steps = f"{plan.mini_batches} (mini-batches) x {plan.epochs} (epochs) = {plan.optimizer_steps}"
    tokens = f"at most {plan.tokens} a step, {plan.longest_sequence} a sequence"
    if plan.computed_tokens < plan.tokens:
        tokens += f"; {plan.computed_tokens} computed, prompts once a group"
    return [
        ("rollouts", samples),
        ("mini-batches", minis),
        ("micro-batches", f"{micros} on each device"),
        ("optimizer steps", f"{steps} a step"),
        ("tokens", tokens),
        ("steps", str(plan.total_steps or "as many as the rows and total_epochs make")),
    ]
