"""What `check` knows without importing it is what there is, kind by kind.

Kinds are enumerated, not listed: every registry of the package is compared with a catalog, and so
is every key with a closed set of words. One that nobody compares fails here.
"""

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from luyen.algorithms.aggregation import AGGREGATIONS as AGGREGATION_FUNCTIONS
from luyen.algorithms.kl import PENALTIES
from luyen.base.registry import Registry
from luyen.config.catalog import ADV_ESTIMATORS, AGGREGATIONS, KL_KINDS, POLICY_LOSSES
from luyen.config.environments import ENVIRONMENT_ARGUMENTS as ENVIRONMENT_KNOBS
from luyen.config.fields import field, walk
from luyen.config.plugins import BUILT_IN, ENVIRONMENTS, LOGGERS, SOURCES
from luyen.config.reward_components import ARGUMENT_SPECS, RULE_REWARDS
from luyen.config.task_urls import OPERATIONS, PREFERENCE_CRITERIA, TOOL_TASKS
from luyen.config.tool_file import SETTINGS
from luyen.data import arithmetic_tasks, sources, tool_tasks
from luyen.telemetry.remote_sinks import REMOTE
from luyen.train.offline.build import STAGES
from tests.architecture import tree
from tests.architecture.registered import Knobs, estimators, knobs_of, loss_knobs_of, losses, ours

CATALOGS: dict[str, Iterable[str]] = {**BUILT_IN, "builtin_tools": SETTINGS}
"""Registry -> the names that `check` knows of it."""
PATTERNS = ("pattern", "forbidden_arguments")
"""Knobs that hold regular expressions, whose values a rule of their own reads."""
PARTIAL = {"loss_statistics": POLICY_LOSSES}
"""Registries that hold something for some of the names only."""
NOT_FOR_PLUGINS = {"builtin_tools", "loss_statistics"}
"""Registries whose names stand in no configuration, or beside another registration."""
TABLES: dict[str, tuple[Iterable[str], Iterable[str]]] = {
    "aggregations": (AGGREGATIONS, AGGREGATION_FUNCTIONS),
    "KL estimators": (KL_KINDS, PENALTIES),
    "sources of rows": (SOURCES, sources.SCHEMES),
    "tool tasks": (TOOL_TASKS, tool_tasks.TASKS),
    "operations": (OPERATIONS, arithmetic_tasks.OPERATIONS),
    "tastes": (PREFERENCE_CRITERIA, arithmetic_tasks.PREFERENCES),
    "stages": (field("trainer.stage").choices, ("rl", *STAGES)),
    "aggregation of a policy loss": (
        field("actor_rollout_ref.actor.loss_agg_mode").choices,
        AGGREGATION_FUNCTIONS,
    ),
}
"""Kinds that a table implements: the names that `check` knows, and those of the table."""


def violations(declared: Mapping[str, Iterable[str]], registered: Mapping[str, Knobs]) -> list[str]:
    """Names on one side only, and names whose knobs differ."""
    problems = [f"{n}: in the catalog, not registered" for n in declared if n not in registered]
    problems += [f"{n}: registered, not in the catalog" for n in registered if n not in declared]
    for name in sorted(declared.keys() & registered.keys()):
        difference = set(declared[name]) ^ set(registered[name])
        problems += [f"{name}: knob {hparam} on one side only" for hparam in sorted(difference)]
    return problems


def registries(modules: Iterable[ModuleType]) -> dict[str, Registry[Callable[..., Any]]]:
    """Every registry of these modules by the name of its variable; aliases in capitals aside."""
    found: dict[str, Registry[Callable[..., Any]]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Registry) and not name.isupper():
                known = found.setdefault(name, value)
                assert known is value, f"two registries are called {name}"
    return found


@cache
def all_registries() -> dict[str, Registry[Callable[..., Any]]]:
    """Those of the package."""
    return registries(tree.modules())


def uncompared(names: Iterable[str]) -> set[str]:
    """Registries that have no catalog."""
    return set(names) - CATALOGS.keys() - PARTIAL.keys()


def test_every_registry_is_compared_with_a_catalog():
    found = all_registries()
    assert len(found) > 10
    assert uncompared(found) == set()
    assert (CATALOGS.keys() | PARTIAL.keys()) - found.keys() == set()
    assert BUILT_IN.keys() == found.keys() - NOT_FOR_PLUGINS


@pytest.mark.parametrize("kind", sorted(CATALOGS))
def test_the_catalog_lists_exactly_what_is_registered(kind: str):
    registry = all_registries()[kind]
    assert sorted(CATALOGS[kind]) == sorted(ours(registry))


@pytest.mark.parametrize("kind", sorted(PARTIAL))
def test_what_is_there_for_some_names_is_for_names_that_exist(kind: str):
    assert set(ours(all_registries()[kind])) <= set(PARTIAL[kind])


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_the_names_that_a_check_knows_are_those_of_the_table(kind: str):
    known, there = TABLES[kind]
    assert sorted(known) == sorted(there)


def test_every_logger_has_a_sink():
    local = {
        name for keys in _dict_keys("src/luyen/telemetry/sinks.py", "console") for name in keys
    }
    # metrics.jsonl is written whatever is named; the name stays for files that have it.
    assert sorted(LOGGERS) == sorted({*local, *REMOTE, "jsonl"})


def _dict_keys(path: str, among: str) -> list[set[str]]:
    """String keys of the dictionaries that a file spells out and that have a certain one."""
    nodes = tree.nodes((tree.ROOT / path).read_text())
    found = [
        {str(k.value) for k in n.keys if isinstance(k, ast.Constant)}
        for n in nodes
        if isinstance(n, ast.Dict)
    ]
    return [keys for keys in found if among in keys]


def unspoken(choices: Iterable[str], words: set[str]) -> list[str]:
    """Choices that no code mentions; one may be what is left where no other is chosen."""
    silent = [choice for choice in choices if choice not in words]
    return silent if len(silent) > 1 else []


def test_every_word_of_a_closed_set_is_one_that_some_code_asks_for():
    words = {
        node.value
        for path, text in tree.sources()
        if "/config/schema/" not in path
        for node in tree.nodes(text)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    closed = {info.path: info.choices for info in walk() if info.choices and info.only is None}
    assert len(closed) > 30
    silent = {path: unspoken(choices, words) for path, choices in closed.items()}
    assert [path for path, missing in silent.items() if missing] == []


def test_the_catalog_lists_every_estimator_with_its_knobs():
    declared = {name: facts.hparams for name, facts in ADV_ESTIMATORS.items()}
    assert violations(declared, estimators()) == []


def test_the_catalog_lists_every_policy_loss_with_its_knobs():
    declared = {name: facts.hparams for name, facts in POLICY_LOSSES.items()}
    assert violations(declared, losses()) == []


_KINDS = {int: "whole", float: "number", bool: "flag", str: "text"}


def kind_of_annotation(annotation: Any) -> tuple[str, tuple[str, ...], bool]:
    """Kind, choices and whether null is one, as `KnobValue` says it."""
    parts = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    (kind,) = [part for part in parts if part is not type(None)]
    is_optional = type(None) in parts
    if typing.get_origin(kind) is typing.Literal:
        return "choice", typing.get_args(kind), is_optional
    if kind in _KINDS:
        return _KINDS[kind], (), is_optional
    inner = typing.get_args(kind)
    if inner == (str,):
        return "texts", (), is_optional
    return ("numbers" if inner == (str, float) else "object"), (), is_optional


def test_values_of_knobs_are_those_that_the_rules_take():
    registry = all_registries()["rule_rewards"]
    for name in RULE_REWARDS:
        parameters = inspect.signature(registry.get(name)).parameters.values()
        for hparam in (p for p in parameters if p.kind is p.KEYWORD_ONLY):
            if hparam.name in PATTERNS:
                continue
            known = ARGUMENT_SPECS[hparam.name]
            found = kind_of_annotation(hparam.annotation)
            assert (known.kind, known.choices, known.is_optional) == found, f"{name}.{hparam.name}"


def test_arguments_of_environments_are_those_that_they_take():
    registry = all_registries()["envs"]
    assert sorted(ENVIRONMENT_KNOBS) == sorted(ENVIRONMENTS)
    for kind, (needed, others) in ENVIRONMENT_KNOBS.items():
        parameters = inspect.signature(registry.get(kind)).parameters
        assert {*needed, *others} == set(parameters)
        assert set(needed) == {n for n, p in parameters.items() if p.default is p.empty}


def test_a_registry_that_nobody_compares_is_caught():
    module = ModuleType("planted")
    module.reward_shapes = Registry("shape", "reward.shape")  # type: ignore[attr-defined]
    assert uncompared(registries([module])) == {"reward_shapes"}
    assert unspoken(["here", "there", "nowhere"], {"here"}) == ["there", "nowhere"]


def test_a_difference_is_caught():
    def estimator(x: float, *, gamma: float = 1.0) -> float:
        return x * gamma

    registered = {"a": knobs_of(estimator)}
    assert violations({"a": ["gamma"]}, registered) == []
    assert violations({"a": ["lam"]}, registered) == [
        "a: knob gamma on one side only",
        "a: knob lam on one side only",
    ]
    assert len(violations({"b": []}, registered)) == 2


def test_the_knobs_of_a_statistics_pass_count_and_its_seed_does_not():
    assert {"clip_cov_ratio", "clip_ratio"} <= set(loss_knobs_of("clip_cov"))
    assert "seed" not in loss_knobs_of("clip_cov")
