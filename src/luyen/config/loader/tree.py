"""A nested configuration in which every value knows where it was written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

from luyen.config.problem import DEFAULT, Origin, Problem

NestedDict: TypeAlias = dict[str, Any]
"""Nested values as YAML gives them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigTree:
    """Nested values with the origin of each, and what was wrong with the text.

    Example:
        >>> where = Origin(source="a.yaml", line=2)
        >>> tree = ConfigTree(values={"trainer": {"nnodes": 2}}, origins={"trainer.nnodes": where})
        >>> leaves(tree.values)
        [('trainer.nnodes', 2)]
    """

    values: NestedDict
    """Nested mappings down to plain values."""
    origins: dict[str, Origin]
    """Where each dotted key was written."""
    problems: tuple[Problem, ...] = ()
    """Syntax errors and keys written twice."""
    references: NestedDict = field(default_factory=dict[str, Any])
    """Key -> what was written there, for values that came from the environment."""


def merge(trees: Sequence[ConfigTree]) -> ConfigTree:
    """Later trees win over earlier ones, key by key."""
    values: NestedDict = {}
    origins: dict[str, Origin] = {}
    problems: list[Problem] = []
    references: NestedDict = {}
    for tree in trees:
        written = {path for path, _ in leaves(tree.values)}
        references = {k: v for k, v in references.items() if k not in written} | tree.references
        values = merged(values, tree.values)
        origins |= tree.origins
        problems += tree.problems
    return ConfigTree(
        values=values, origins=origins, problems=tuple(problems), references=references
    )


def merged(below: NestedDict, above: NestedDict) -> NestedDict:
    """`above` laid over `below`; mappings are joined, everything else replaced."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            result[name] = merged(cast(NestedDict, old), cast(NestedDict, value))
        else:
            result[name] = value
    return result


def nested(path: list[str], value: Any) -> NestedDict:
    """A tree that holds one value, at `path`."""
    return {path[0]: value if len(path) == 1 else nested(path[1:], value)}


def leaves(values: NestedDict, path: str = "") -> list[tuple[str, Any]]:
    """Dotted path and value of everything that is not a mapping."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        below = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            found += leaves(cast(NestedDict, value), below)
        else:
            found.append((below, value))
    return found


def origin_of(path: str, origins: dict[str, Origin]) -> Origin:
    """Where a key was written: itself, the nearest block around it, or the first key below it."""
    around = path
    while around:
        if around in origins:
            return origins[around]
        around = around.rpartition(".")[0]
    below = (origin for key, origin in origins.items() if key.startswith(f"{path}."))
    return next(below, DEFAULT)


def value_in(values: NestedDict, path: str) -> Any:
    """The value at a dotted path, a mapping included."""
    name, _, rest = path.partition(".")
    return value_in(values[name], rest) if rest else values[name]


def replaced(values: NestedDict, path: list[str], value: Any) -> NestedDict:
    """The values with another one at `path`."""
    inner = value if len(path) == 1 else replaced(values[path[0]], path[1:], value)
    return {**values, path[0]: inner}


def removed(values: NestedDict, path: list[str]) -> NestedDict:
    """The values without the one at `path`."""
    if len(path) == 1:
        return {name: value for name, value in values.items() if name != path[0]}
    return {**values, path[0]: removed(values[path[0]], path[1:])}
