"""Resolves `${...}`: other keys and OmegaConf's resolvers, with limits on the expansion.

What the environment gave is known afterwards: such a value is never written down.
"""

import os
import re
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias, cast, final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from luyen.base.errors import shortened
from luyen.base.secrets import remember
from luyen.config.fields import all_fields
from luyen.config.loader.tree import (
    ConfigTree,
    NestedDict,
    leaves,
    merged,
    origin_of,
    removed,
    replaced,
)
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig

_ENV = "oc.env"
_NONE = object()
_PLACES = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
"""Keys that name the run directory: what a folder is called can be read on the disk."""


def interpolate(tree: ConfigTree, *, reads_environment: bool = True) -> ConfigTree:
    """Replace `${...}` by what it names; what cannot be resolved is reported and left out.

    What was written for a value of the environment is among the tree's `references`. Where the
    environment is not to be read, such a value stays as it is written.
    """
    pending = {path: value for path, value in leaves(tree.values) if "${" in str(value)}
    if not pending:
        return tree
    values, problems = tree.values, list(tree.problems)
    references = dict(tree.references)
    sound = _sound(tree.values)
    for path, value in pending.items():
        with _variables(is_read=reads_environment) as variables:
            try:
                found = _resolve(path, value, sound)
            except OmegaConfBaseException as error:
                problems.append(_unresolved(path, value, error, variables, tree))
                values = removed(values, path.split("."))
                continue
        if variables:
            references[path] = value
        if variables and reads_environment and path not in _PLACES:
            _hide(variables)
        if reads_environment or not variables:
            values = replaced(values, path.split("."), found)
    return ConfigTree(
        values=values, origins=tree.origins, problems=tuple(problems), references=references
    )


@contextmanager
def _variables(*, is_read: bool) -> Generator[set[str]]:
    """Collect the names of environment variables read in the block, directly or via other keys."""
    variables: set[str] = set()

    def env(name: str, default: Any = _NONE) -> Any:
        variables.add(str(name))
        if not is_read:
            return ""
        return oc.env(name) if default is _NONE else oc.env(name, default)

    _register(env)
    try:
        yield variables
    finally:
        _register(oc.env)


def _register(resolver: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        # Later versions want another method for this, which means something else in earlier ones.
        warnings.simplefilter("ignore", UserWarning)
        OmegaConf.register_new_resolver(_ENV, resolver, replace=True)


def _hide(names: set[str]) -> None:
    for name in names & os.environ.keys():
        remember(os.environ[name], f"${{{_ENV}:{name}}}")


def _unresolved(
    path: str, value: Any, error: OmegaConfBaseException, variables: set[str], tree: ConfigTree
) -> Problem:
    derived = next((path for path in _derived() if path in str(value)), None)
    missing = sorted(name for name in variables if name not in os.environ)
    fix = "name an existing key, or a resolver such as ${oc.env:HOME}"
    if derived is not None:
        fix = f"write {derived}: what is derived from other keys cannot be named"
    if missing:
        fix = f"export {missing[0]}=..., or write a default: ${{{_ENV}:{missing[0]},VALUE}}"
    return Problem(
        id="C008",
        severity="error",
        field=path,
        value=value,
        why=f"cannot be resolved: {str(error).splitlines()[0]}",
        fix=fix,
        origin=origin_of(path, tree.origins),
    )


@cache
def _derived() -> list[str]:
    return [path for path, info in all_fields().items() if info.derived]


def _sound(written: NestedDict) -> DictConfig:
    """Everything that may be named, defaults included; not what OmegaConf itself cannot hold."""
    values = RunConfig().model_dump(mode="json")
    for path in _derived():
        values = removed(values, path.split("."))  # nothing but other keys says what it is
    values = merged(values, written)
    for path, value in leaves(written):
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            values = removed(values, path.split("."))
    return OmegaConf.create(values)


def _resolve(path: str, value: Any, sound: DictConfig) -> Any:
    OmegaConf.create({"value": value})  # a malformed expression raises here, by itself
    found = OmegaConf.select(sound, path, throw_on_missing=True)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


# Limits on the expansion of `${...}`, checked before anything is resolved.
#
# OmegaConf resolves a value again at every reference, so thirty keys of which each names
# the one before twice expand to a billion. Here each is counted once, by its expanded size.

Path: TypeAlias = tuple[str, ...]
MOST_REFERENCES = 1000
"""`${...}` that one value may come to, with those in what it names."""
MOST_CHARACTERS = 100_000
"""Characters of text that one value may come to."""
DEEPEST = 50
"""Keys through which a value may be named."""
_IN_ALL = 5 * MOST_REFERENCES
_NESTED = 10
_MANY = 20
_PARTS = re.compile(r"[.\[\]]+")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What a value comes to once it is resolved.

    Example:
        >>> _sum([_Cost(references=1), _Cost(references=2, height=1)]).references
        3
    """

    references: int = 0
    """`${...}` in it and in what it names."""
    characters: int = 0
    """Length of its text."""
    height: int = 0
    """Values through which it is named."""


class _TooMuch(Exception):
    """Why a value is not resolved."""


def refuse_floods(tree: ConfigTree) -> ConfigTree:
    """The tree without values that would come to too much, and a problem for each of them."""
    costs = _Costs(tree.values)
    values, problems, in_all = tree.values, list(tree.problems), 0
    for path, value in leaves(tree.values):
        if "${" not in str(value):
            continue
        try:
            in_all += costs.of(tuple(path.split("."))).references
            why = f"all values together come to more than {_IN_ALL:,} references"
        except _TooMuch as error:
            why = str(error)
        else:
            if in_all <= _IN_ALL:
                continue
        values = removed(values, path.split("."))
        if len(problems) < len(tree.problems) + _MANY:
            problems.append(_problem(path, value, why, tree))
    return replace(tree, values=values, problems=tuple(problems))


def _problem(path: str, value: Any, why: str, tree: ConfigTree) -> Problem:
    return Problem(
        id="C008",
        severity="error",
        field=path,
        value=shortened(value),
        why=why,
        fix="write the value itself",
        origin=origin_of(path, tree.origins),
    )


@final
class _Costs:
    """The cost of every value, each counted once."""

    def __init__(self, values: NestedDict) -> None:
        self._values = values
        self._known: dict[Path, _Cost] = {}
        self._open: list[Path] = []

    def of(self, path: Path) -> _Cost:
        """What the value at a path comes to; nothing where there is none."""
        if path in self._known:
            return self._known[path]
        if path in self._open:
            circle = " -> ".join(".".join(one) for one in (*self._open, path))
            raise _TooMuch(f"the values name each other: {shortened(circle)}")
        self._open.append(path)
        try:
            found = self._counted(path)
        finally:
            self._open.pop()
        self._known[path] = found
        return found

    def _counted(self, path: Path) -> _Cost:
        if len(self._open) > 2 * DEEPEST:
            raise _TooMuch(f"it is named through more than {DEEPEST} other values")
        value = self._at(path)
        if isinstance(value, dict):
            inner = [(*path, str(name)) for name in cast(NestedDict, value)]
        elif isinstance(value, list):
            inner = [(*path, str(i)) for i in range(len(cast(list[Any], value)))]
        elif isinstance(value, str) and "${" in value:
            return self._text(path, value)
        else:
            return _Cost(characters=len(value) if isinstance(value, str) else 1)
        return _sum([self.of(one) for one in inner])

    def _text(self, path: Path, text: str) -> _Cost:
        named = [self.of(_absolute(key, path)) for key in _named(text)]
        found = _sum([_Cost(references=1, characters=len(text)), *named])
        found = replace(found, height=1 + found.height)
        if found.references > MOST_REFERENCES:
            raise _TooMuch(f"it comes to more than {MOST_REFERENCES:,} references")
        if found.characters > MOST_CHARACTERS:
            raise _TooMuch(f"it comes to more than {MOST_CHARACTERS:,} characters")
        if found.height > DEEPEST:
            raise _TooMuch(f"it is named through more than {DEEPEST} other values")
        return found

    def _at(self, path: Path) -> Any:
        found: Any = self._values
        for name in path:
            if isinstance(found, dict):
                found = cast(dict[str, Any], found).get(name)
            elif isinstance(found, list) and name.isdecimal() and len(name) < 9:
                listed = cast(list[Any], found)
                found = listed[int(name)] if int(name) < len(listed) else None
            else:
                return None
        return found


def _sum(costs: list[_Cost]) -> _Cost:
    return _Cost(
        references=sum(cost.references for cost in costs),
        characters=sum(cost.characters for cost in costs),
        height=max((cost.height for cost in costs), default=0),
    )


def _named(text: str) -> Iterator[str]:
    """Keys that a text names: directly, or as an argument of a resolver."""
    if len(text) > MOST_CHARACTERS:
        raise _TooMuch(f"a text with references has more than {MOST_CHARACTERS:,} characters")
    begun: list[int] = []
    for found in re.finditer(r"\$\{|\}", text):
        if found.group() == "${":
            begun.append(found.end())
        elif begun:
            inside = text[begun.pop() : found.start()]
            resolver, colon, arguments = inside.partition(":")
            if "${" in resolver:
                raise _TooMuch("the name of a key is made from another value")
            yield from (one.strip() for one in arguments.split(",")) if colon else [inside.strip()]
        if len(begun) > _NESTED:
            raise _TooMuch(f"`${{` inside one another more than {_NESTED} levels deep")


def _absolute(key: str, at: Path) -> Path:
    """The path that a key means at a place; a leading dot is the block around it."""
    plain = key.lstrip(".")
    up = len(key) - len(plain)
    names = tuple(name for name in _PARTS.split(plain) if name)
    return (*at[: max(len(at) - up, 0)], *names) if up else names
