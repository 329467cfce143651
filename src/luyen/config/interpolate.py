"""`${...}`: other keys (defaults included) and OmegaConf's resolvers.

What the environment gave is known afterwards: such a value is never written down.
"""

import os
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from luyen.base.secrets import remember
from luyen.config.fields import all_fields
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Mapping, Tree, leaves, merged, origin_of, removed, replaced

_ENV = "oc.env"
_NONE = object()
_PLACES = ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
"""Keys that name the run directory: what a folder is called can be read on the disk."""


def interpolate(tree: Tree, *, reads_environment: bool = True) -> Tree:
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
        with _variables(is_read=reads_environment) as asked:
            try:
                found = _resolve(path, value, sound)
            except OmegaConfBaseException as error:
                problems.append(_unresolved(path, value, error, asked, tree))
                values = removed(values, path.split("."))
                continue
        if asked:
            references[path] = value
        if asked and reads_environment and path not in _PLACES:
            _hide(asked)
        if reads_environment or not asked:
            values = replaced(values, path.split("."), found)
    return Tree(
        values=values, origins=tree.origins, problems=tuple(problems), references=references
    )


@contextmanager
def _variables(*, is_read: bool) -> Generator[set[str]]:
    """The names of the variables that are asked for meanwhile, through whatever other keys."""
    asked: set[str] = set()

    def env(name: str, default: Any = _NONE) -> Any:
        asked.add(str(name))
        if not is_read:
            return ""
        return oc.env(name) if default is _NONE else oc.env(name, default)

    _register(env)
    try:
        yield asked
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
    path: str, value: Any, error: OmegaConfBaseException, asked: set[str], tree: Tree
) -> Problem:
    derived = next((path for path in _derived() if path in str(value)), None)
    missing = sorted(name for name in asked if name not in os.environ)
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


def _sound(written: Mapping) -> DictConfig:
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
