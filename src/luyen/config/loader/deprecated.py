"""Keys that an earlier version had under another name, read for one more version with a warning.

A key that is renamed in version 0.N is entered here with `ends="0.N+1"`: all of 0.N reads it under
its new name, and warns. In 0.N+1 the entry is removed, and the key is unknown as any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from luyen.config.loader.tree import ConfigTree, leaves, merged, nested, origin_of, removed
from luyen.config.problem import Problem, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecation:
    """What became of a key.

    Example:
        >>> Deprecation(new="trainer.seed", ends="0.2").ends
        '0.2'
    """

    new: str
    """The key to write."""
    ends: str
    """The first version that does not read the old one."""


DEPRECATED: dict[str, Deprecation] = {
    "actor_rollout_ref.rollout.server.lora": Deprecation(
        new="actor_rollout_ref.rollout.server.lora_format", ends="0.2"
    ),
}
"""Old key -> the new one. `docs/compatibility.md` lists them."""


def with_new_names(tree: ConfigTree, table: Mapping[str, Deprecation] = DEPRECATED) -> ConfigTree:
    """The tree under today's names, with a warning for each old one.

    A key that is written under both names is an error, unless both have the same value.
    """
    for old, value in leaves(tree.values):
        if old not in table:
            continue
        entry = table[old]
        written = dict(leaves(tree.values))
        values = removed(tree.values, old.split("."))
        is_twice = entry.new in written and written[entry.new] != value
        if not is_twice:
            values = merged(values, nested(entry.new.split("."), value))
        origin = origin_of(old, tree.origins)
        origins = {path: at for path, at in tree.origins.items() if path != old}
        problem = _problem(tree, old, value, entry, is_twice=is_twice)
        tree = replace(
            tree,
            values=values,
            origins=origins if is_twice else {**origins, entry.new: origin},
            problems=(*tree.problems, problem),
        )
    return tree


def _problem(
    tree: ConfigTree, old: str, value: Any, entry: Deprecation, *, is_twice: bool
) -> Problem:
    severity: Severity = "error" if is_twice else "warning"
    why = f"the old name of {entry.new}, which version {entry.ends} does not read any more"
    if is_twice:
        why = f"the old name of {entry.new}, which is written too, with another value"
    fix = f"keep {entry.new}" if is_twice else f"write {entry.new}"
    origin = origin_of(old, tree.origins)
    return Problem(
        id="A16", severity=severity, field=old, value=value, why=why, fix=fix, origin=origin
    )
