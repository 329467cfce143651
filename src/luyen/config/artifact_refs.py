"""`artifact:...` in the place of a path: which keys have one, and what is put there instead."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.config.problem import Problem
from luyen.config.schema.trainer import Trainer
from luyen.config.tree import Tree, origin_of, replaced, value_in
from luyen.telemetry.artifact_registry import Registry
from luyen.telemetry.artifacts import Artifact

PREFIX = "artifact:"


def refs_in(tree: Tree) -> dict[str, str]:
    """Key -> what stands after `artifact:`; an entry of a list has its number after the key.

    Example:
        >>> refs_in(Tree(values={"data": {"train_files": ["artifact:rows@ab12cd"]}}, origins={}))
        {'data.train_files.0': 'rows@ab12cd'}
    """
    return dict(_refs(tree.values, ""))


def _refs(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(path, value.removeprefix(PREFIX))] if value.startswith(PREFIX) else []
    if isinstance(value, dict):
        inner = list(cast(dict[str, Any], value).items())
    elif isinstance(value, list):
        inner = [(str(i), one) for i, one in enumerate(cast(list[Any], value))]
    else:
        return []
    return [found for name, one in inner for found in _refs(one, f"{path}.{name}".lstrip("."))]


def with_paths(tree: Tree, paths: Mapping[str, str]) -> Tree:
    """The tree with a path at each of the keys that `refs_in` gave."""
    values = tree.values
    references = {k: v for k, v in tree.references.items() if k not in paths}
    for key, path in paths.items():
        block, _, last = key.rpartition(".")
        above = value_in(values, block) if block else values
        if isinstance(above, list):
            listed = [*cast(list[Any], above)]
            listed[int(last)] = path
            values = replaced(values, block.split("."), listed)
        else:
            values = replaced(values, key.split("."), path)
    return replace(tree, values=values, references=references)


def named_artifacts(tree: Tree) -> dict[str, Artifact]:
    """Key -> the artifact that it names; a UserError for the first name that nobody has noted."""
    refs = refs_in(tree)
    registry = Registry(root_of(tree)) if refs else None
    return {key: registry.one(words, key) for key, words in refs.items() if registry is not None}


def with_artifacts(tree: Tree, find: Callable[[str, str], str] | None = None) -> Tree:
    """The tree with paths in the place of artifacts; a name that is not known is a problem.

    `find` gives the path for words and a key. Nothing is hashed: that is for whoever reads the
    content.
    """
    refs = refs_in(tree)
    if not refs:
        return tree
    registry = Registry(root_of(tree)) if find is None else None
    paths: dict[str, str] = {}
    problems = list(tree.problems)
    for key, words in refs.items():
        try:
            paths[key] = find(words, key) if find is not None else _path(registry, words, key)
        except UserError as error:
            problems.append(_unknown(key, error, tree))
    return replace(with_paths(tree, paths), problems=tuple(problems))


def _path(registry: Registry | None, words: str, key: str) -> str:
    assert registry is not None
    return registry.one(words, key).path


def root_of(tree: Tree) -> Path:
    """The folder whose runs are meant: that of this run."""
    trainer = tree.values.get("trainer")
    written: Any = cast(dict[str, Any], trainer) if isinstance(trainer, dict) else {}
    folder = written.get("default_local_dir", Trainer().default_local_dir)
    return expanded(str(folder))


def _unknown(key: str, error: UserError, tree: Tree) -> Problem:
    return Problem(
        id="C013",
        severity="error",
        field=key,
        value=error.value,
        why=error.why,
        fix=error.fix,
        origin=origin_of(key, tree.origins),
    )
