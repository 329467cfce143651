"""`check`: every problem of a configuration at once, then the plan it describes."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import final

from luyen.base.compat import version_of
from luyen.base.errors import UserError
from luyen.config.artifact_refs import with_artifacts
from luyen.config.fields import all_fields
from luyen.config.load import load
from luyen.config.machine import Machine, this_machine
from luyen.config.memory import MemoryPlan, plan_memory
from luyen.config.model_shape import ModelShape, read_shape
from luyen.config.parse import parse
from luyen.config.plan import BatchPlan, Placement, place, plan_batches
from luyen.config.plugins import Known, read_plugins
from luyen.config.problem import DEFAULT, Origin, Problem
from luyen.config.rules.all import RULES
from luyen.config.rules.rule import Situation, value_at
from luyen.config.run_names import name_after
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Tree, origin_of
from luyen.config.written import masked_problems, remember_secrets

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
    """The configuration; what was wrong with it stands at its default."""
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
    """Whether a Python package could be imported here, without importing it."""
    return importlib.util.find_spec(package) is not None


def check(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    installed: Callable[[str], bool] = is_installed,
    versions: Callable[[str], tuple[int, int] | None] = version_of,
    missing_promises: Callable[[], tuple[str, ...]] = tuple,
    starts_a_run: bool = True,
) -> Report:
    """Load, parse, apply every rule and make the plan. Nothing is written, no model is loaded.

    Where no run is to start, a run of the same name that is there does not matter.
    """
    tree = with_artifacts(load(files, overrides, below=name_after(files)))
    return check_tree(
        tree,
        machine=machine,
        installed=installed,
        versions=versions,
        missing_promises=missing_promises,
        starts_a_run=starts_a_run,
    )


def check_tree(
    tree: Tree,
    *,
    machine: Machine | None = None,
    installed: Callable[[str], bool] = is_installed,
    versions: Callable[[str], tuple[int, int] | None] = version_of,
    missing_promises: Callable[[], tuple[str, ...]] = tuple,
    starts_a_run: bool = True,
) -> Report:
    """The same for a configuration that is loaded already, with no artifact in it left to find."""
    parsed = parse(tree)
    config = parsed.config
    here = machine or this_machine()
    known, broken = read_plugins(config.trainer.plugins)
    estimator = known.estimators.get(config.algorithm.adv_estimator)
    where = place(config, here, estimator)
    plan = _plan(config, known, where, here)
    situation = Situation(
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
    )
    remember_secrets(config)
    found = [*tree.problems, *masked_problems(tree), *parsed.problems]
    wrong = {problem.field for problem in found}
    found += [p for p in _not_yet(config, tree) if p.field not in wrong]
    if not any(problem.id in _UNREAD for problem in found):
        broken = _broken_rules(situation, tree)
        broken = [p for p in broken if starts_a_run or p.id not in _STARTING]
        found += [p for p in broken if p.field not in wrong]
    found.sort(key=lambda problem: _ORDER[problem.severity])
    return Report(problems=tuple(found), config=config, origins=tree.origins, plan=plan)


def _plan(config: RunConfig, known: Known, where: Placement, machine: Machine) -> Plan:
    batch = plan_batches(config, world_size=where.world_size, losses=known.preference_losses)
    shape = read_shape(config.actor_rollout_ref.model)
    memory = plan_memory(config, shape, batch, where, machine) if shape else None
    return Plan(batch=batch, where=where, shape=shape, memory=memory)


def _not_yet(config: RunConfig, tree: Tree) -> Iterator[Problem]:
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
_OFFLINE = ("D", "F", "G", "H", "M", "N", "S", "Y", "B05", "B06", "B07", "P02")
"""Rules that concern an offline run too; the others are about rollouts and rewards."""


def _applies(rule: str, stage: str) -> bool:
    return stage == "rl" or rule.startswith(_OFFLINE)


def _broken_rules(s: Situation, tree: Tree) -> Iterator[Problem]:
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
