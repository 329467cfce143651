"""Registered names: built-in ones, and those of plugin files, read as syntax trees.

A plugin is read as a syntax tree, never imported: it may import torch, and a check must be quick.
"""

import ast
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

from luyen.base.input_files import expanded, read_text
from luyen.config.catalog import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    ROLLOUT_ENGINES,
    SUPERVISED_LOSSES,
    TRAINING_ENGINES,
    EngineFacts,
    EstimatorFacts,
    LossFacts,
    PreferenceFacts,
    TrainingFacts,
)
from luyen.config.reward_components import RULE_REWARDS, RuleFacts

# Python files that a configuration names, read as syntax trees and never executed.
#
# What a file does when it is imported cannot be seen here: it may raise, or define names by
# other means. That a file is there, and is Python, can.


def _is_importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def read_python(path: Path) -> ast.Module:
    """The syntax tree of a file; an OSError says why there is none.

    Example:
        >>> read_python(Path("no/such/file.py"))
        Traceback (most recent call last):
        OSError: cannot be read: [Errno 2] No such file or directory: 'no/such/file.py'
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise OSError(f"cannot be read: {error}") from error
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise OSError(f"is not valid Python: line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL, or nested too deep
        why = str(error) or "it is nested too deep"
        raise OSError(f"is not valid Python: {why}") from error


def import_fault(tree: ast.Module, installed: Callable[[str], bool] = _is_importable) -> str | None:
    """Why importing a file certainly fails; None: nothing that always runs shows it.

    Example:
        >>> import_fault(ast.parse("import no_such_package"))
        'line 1 imports no_such_package, which is not installed here'
    """
    for node in tree.body:
        match node:
            case ast.Raise():
                return f"line {node.lineno} raises whenever the file is imported"
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                modules = []
        for module in modules:
            root = module.partition(".")[0]
            if not installed(root):
                return f"line {node.lineno} imports {root}, which is not installed here"
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a function can be called with.

    Example:
        >>> Arguments(names=("a",), required=("a",), has_more=False).takes("b")
        False
    """

    names: tuple[str, ...]
    """Arguments that can be given by name."""
    required: tuple[str, ...]
    """Arguments without a default, those without a name included."""
    has_more: bool
    """Whether it takes any other keyword arguments (`**kwargs`)."""

    def takes(self, name: str) -> bool:
        """Whether an argument of this name can be given."""
        return self.has_more or name in self.names

    def fits(self, names: Collection[str]) -> bool:
        """Whether the function can be called with exactly these keyword arguments.

        Example:
            >>> Arguments(names=("a", "b"), required=("a",), has_more=False).fits(["b"])
            False
        """
        return all(map(self.takes, names)) and set(self.required) <= set(names)


def arguments_of(path: str, function: str) -> Arguments | None:
    """The arguments of a function at the top of a file; None where there is none to be found."""
    try:
        body = read_python(expanded(path)).body
    except OSError:
        return None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return _declared(node.args)
    return None


def _declared(given: ast.arguments) -> Arguments:
    """Arguments of a definition. One without a name that is required is required under no name."""
    first = [*given.posonlyargs, *given.args]
    needed = first[: len(first) - len(given.defaults)]
    only = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    required = [*needed, *(argument for argument, default in only if default is None)]
    unnamed = {argument.arg for argument in given.posonlyargs}
    return Arguments(
        names=tuple(argument.arg for argument in (*given.args, *given.kwonlyargs)),
        required=tuple("" if one.arg in unnamed else one.arg for one in required),
        has_more=given.kwarg is not None,
    )


REWARD_MANAGERS = ("naive", "batch", "dapo", "prime")
SOURCES = ("arithmetic", "tools", "reasoning_gym", "hf")
SOURCE_PACKAGES = {
    "hf": ("datasets", "datasets"),
    "reasoning_gym": ("reasoning_gym", "tasks"),
}
"""Source -> the package it needs and the extra that brings it."""
SAMPLERS = ("shuffled", "sequential", "grouped", "mixed", "curriculum")
SAMPLER_NEEDS = {"mixed": "weights", "curriculum": "key"}
"""Sampler -> the argument it cannot do without."""
SAMPLER_ARGUMENTS = {
    "shuffled": {"seed": "a whole number"},
    "sequential": {"seed": "a whole number"},
    "grouped": {"seed": "a whole number"},
    "mixed": {"seed": "a whole number", "weights": "a mapping of numbers"},
    "curriculum": {
        "seed": "a whole number",
        "key": "a name",
        "stages": "a whole number",
        "promote_at": "a number",
    },
}
"""Built-in sampler -> its arguments and their types; a test keeps the names in sync."""
TOOL_FORMATS = ("hermes", "qwen3_coder", "llama3", "mistral", "glm", "deepseek", "gpt_oss")
ENVIRONMENTS = ("user", "class", "interaction", "reasoning_gym", "verifiers")
LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio")


BUILT_IN: dict[str, Collection[str]] = {
    "adv_estimators": ADV_ESTIMATORS,
    "envs": ENVIRONMENTS,
    "policy_losses": POLICY_LOSSES,
    "preference_losses": PREFERENCE_LOSSES,
    "reward_managers": REWARD_MANAGERS,
    "rollout_engines": ROLLOUT_ENGINES,
    "rule_rewards": RULE_REWARDS,
    "samplers": SAMPLERS,
    "supervised_losses": SUPERVISED_LOSSES,
    "tool_parsers": TOOL_FORMATS,
    "training_engines": TRAINING_ENGINES,
}
"""Registry that plugins may add to -> the names that come with the package."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One `registry.register("name", fact=...)` found in a plugin's source.

    Example:
        >>> text = "@adv_estimators.register('mine', needs=('values',))\\ndef f(): ..."
        >>> next(iter(registrations(ast.parse(text)))).name
        'mine'
    """

    registry: str
    """Name of the registry, e.g. `adv_estimators`."""
    name: str
    """Name that becomes usable in the configuration."""
    facts: Mapping[str, Any]
    """Literal keyword arguments after the name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRegistry:
    """Every name a configuration may use, with what `check` must know about it.

    Example:
        >>> PluginRegistry().estimators["gae"].needs
        ('values',)
    """

    estimators: Mapping[str, EstimatorFacts] = field(default_factory=lambda: ADV_ESTIMATORS)
    """Advantage estimators."""
    losses: Mapping[str, LossFacts] = field(default_factory=lambda: POLICY_LOSSES)
    """Policy losses."""
    preference_losses: Mapping[str, PreferenceFacts] = field(
        default_factory=lambda: PREFERENCE_LOSSES
    )
    """Losses of pairs and of marked answers."""
    supervised_losses: tuple[str, ...] = SUPERVISED_LOSSES
    """Losses of given answers."""
    engines: Mapping[str, EngineFacts] = field(default_factory=lambda: ROLLOUT_ENGINES)
    """Rollout engines."""
    training_engines: Mapping[str, TrainingFacts] = field(default_factory=lambda: TRAINING_ENGINES)
    """Training engines."""
    reward_managers: tuple[str, ...] = REWARD_MANAGERS
    """Reward managers."""
    rule_rewards: Mapping[str, RuleFacts] = field(default_factory=lambda: RULE_REWARDS)
    """Rules that score answers."""
    samplers: tuple[str, ...] = SAMPLERS
    """Samplers."""
    tool_formats: tuple[str, ...] = TOOL_FORMATS
    """Ways to write tool calls."""
    environments: tuple[str, ...] = ENVIRONMENTS
    """Kinds of environments."""


def read_plugins(paths: tuple[str, ...]) -> tuple[PluginRegistry, dict[str, str]]:
    """What exists with these plugins, and for each unusable file the reason."""
    found: list[Registration] = []
    broken: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        try:
            tree = read_python(expanded(path))
        except OSError as error:
            broken[path] = str(error)
            continue
        if expanded(path).suffix != ".py":
            broken[path] = "is no Python file: its name does not end with .py"
            continue
        own = list(registrations(tree))
        twice = _duplicate_registrations(own, found)
        reason = import_fault(tree) or twice
        if reason is not None:
            broken[path] = reason
        found += own
    return _with_plugins(found), broken


def _duplicate_registrations(own: list[Registration], before: list[Registration]) -> str | None:
    """Which name is taken, by the package or by an earlier registration."""
    taken = {(entry.registry, entry.name) for entry in before}
    for entry in own:
        if entry.name in BUILT_IN[entry.registry] or (entry.registry, entry.name) in taken:
            return f"registers `{entry.name}` with {entry.registry}, where it is registered already"
        taken.add((entry.registry, entry.name))
    return None


def registrations(tree: ast.AST) -> Iterator[Registration]:
    """Every registration in a module's source, at any depth."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="register", value=owner),
                args=[ast.Constant(value=str(name))],
                keywords=keywords,
            ):
                registry = ast.unparse(owner).rpartition(".")[2]
                facts = {
                    k.arg: ast.literal_eval(k.value)
                    for k in keywords
                    if k.arg is not None and _is_literal(k.value)
                }
                if registry in BUILT_IN:
                    yield Registration(registry=registry, name=name, facts=facts)
            case _:
                pass


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _with_plugins(found: list[Registration]) -> PluginRegistry:
    def of(registry: str) -> list[Registration]:
        return [entry for entry in found if entry.registry == registry]

    estimators = {e.name: _estimator(e.facts) for e in of("adv_estimators")}
    losses = {e.name: _loss(e.facts) for e in of("policy_losses")}
    preferences = {e.name: _preference(e.facts) for e in of("preference_losses")}
    engines = {e.name: _engine(e.facts) for e in of("rollout_engines")}
    training = {e.name: _training(e.facts) for e in of("training_engines")}
    rules = {e.name: _rule(e.facts) for e in of("rule_rewards")}
    return PluginRegistry(
        estimators={**ADV_ESTIMATORS, **estimators},
        losses={**POLICY_LOSSES, **losses},
        preference_losses={**PREFERENCE_LOSSES, **preferences},
        supervised_losses=(*SUPERVISED_LOSSES, *(e.name for e in of("supervised_losses"))),
        engines={**ROLLOUT_ENGINES, **engines},
        training_engines={**TRAINING_ENGINES, **training},
        reward_managers=(*REWARD_MANAGERS, *(e.name for e in of("reward_managers"))),
        rule_rewards={**RULE_REWARDS, **rules},
        samplers=(*SAMPLERS, *(e.name for e in of("samplers"))),
        tool_formats=(*TOOL_FORMATS, *(e.name for e in of("tool_parsers"))),
        environments=(*ENVIRONMENTS, *(e.name for e in of("envs"))),
    )


def _estimator(facts: Mapping[str, Any]) -> EstimatorFacts:
    return EstimatorFacts(
        baseline=str(facts.get("baseline", "none")),
        group_relative=bool(facts.get("group_relative", False)),
        needs=_names(facts.get("needs")),
        hparams=_names(facts.get("knobs")),
    )


def _loss(facts: Mapping[str, Any]) -> LossFacts:
    return LossFacts(
        aggregation=str(facts.get("aggregation", "token-mean")),
        needs=_names(facts.get("needs")),
        hparams=_names(facts.get("knobs")),
    )


def _preference(facts: Mapping[str, Any]) -> PreferenceFacts:
    return PreferenceFacts(
        kind="unpaired" if facts.get("kind") == "unpaired" else "pair",
        reference=bool(facts.get("reference", True)),
        needs_step=bool(facts.get("needs_step", False)),
        needs=_names(facts.get("needs")),
        optional=_names(facts.get("optional")),
        hparams=_names(facts.get("knobs")),
    )


def _engine(facts: Mapping[str, Any]) -> EngineFacts:
    return EngineFacts(
        package=facts.get("package"),
        extra=facts.get("extra"),
        splits=bool(facts.get("splits", False)),
        is_server=bool(facts.get("is_server", False)),
        takes_weights=bool(facts.get("takes_weights", True)),
    )


def _training(facts: Mapping[str, Any]) -> TrainingFacts:
    return TrainingFacts(
        package=facts.get("package"),
        extra=facts.get("extra"),
        splits=bool(facts.get("splits", False)),
    )


def _rule(facts: Mapping[str, Any]) -> RuleFacts:
    hparams = facts.get("knobs")
    return RuleFacts(
        hparams=None if hparams is None else tuple(hparams),
        package=facts.get("package"),
        extra=facts.get("extra"),
    )


def _names(value: Any) -> tuple[str, ...]:
    """A declared tuple of names; anything else declares nothing."""
    listed = cast(list[Any], value) if isinstance(value, list | tuple) else []
    return tuple(str(name) for name in listed)
