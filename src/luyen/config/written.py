"""What of a configuration may be written down, compared and shown.

A value that came from the environment stays the reference that was written: the file that holds it
holds no secret, and whoever reads it again asks the environment again. Numbers, booleans and words
out of a few are no secrets, and a run must be repeatable without its shell: they are written.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.secrets import MASK, has_masked_url, masked_tree, masked_urls, remember
from luyen.config.fields import all_fields
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Mapping, Tree, leaves, origin_of, replaced, value_in


def stored(config: RunConfig) -> Mapping:
    """The configuration as files hold it: environment as references, no password in an address.

    Example:
        >>> stored(RunConfig()) == RunConfig().model_dump(mode="json")
        True
    """
    values = config.model_dump(mode="json")
    for path, written in config.references.items():
        try:
            found = value_in(values, path)
        except (KeyError, TypeError):  # the block was replaced since
            continue
        if not _is_plain(path, found):
            values = replaced(values, path.split("."), written)
    return cast(Mapping, _without_passwords(values))


def shown(config: RunConfig) -> Mapping:
    """The configuration as people and remote loggers see it: values of secret names masked too."""
    return masked_tree(stored(config))


def _is_plain(path: str, found: Any) -> bool:
    """Whether a declared key holds nothing that could be a secret."""
    if path not in all_fields():
        return False
    if isinstance(found, list):
        return not any(isinstance(one, str) for one in cast(list[Any], found))
    return not isinstance(found, str) or bool(all_fields()[path].choices)


def _without_passwords(value: Any) -> Any:
    if isinstance(value, str):
        return masked_urls(value)
    if isinstance(value, dict):
        return {k: _without_passwords(v) for k, v in cast(Mapping, value).items()}
    if isinstance(value, list):
        return [_without_passwords(inner) for inner in cast(list[Any], value)]
    return value


def remember_secrets(config: RunConfig) -> None:
    """Have no message of this process show what keys of secret names hold."""
    for path, value in leaves(config.model_dump(mode="json")):
        if masked_tree(value, path.rpartition(".")[2]) == MASK:
            remember(str(value))


def masked_problems(tree: Tree) -> Iterator[Problem]:
    """C020: addresses whose password is not there, since no run directory stores one."""
    for path, value in leaves(tree.values):
        if has_masked_url(str(value)):
            yield Problem(
                id="C020",
                severity="error",
                field=path,
                value=value,
                why=f"`{MASK}` stands for a password, which no run directory stores",
                fix=f"give it again as {path}=..., or with ${{oc.env:NAME}} in its place",
                origin=origin_of(path, tree.origins),
            )


def refuse_masked(config: RunConfig, blocks: Sequence[str]) -> None:
    """A UserError where a key of these blocks is an address without its password."""
    values = config.model_dump(mode="json")
    tree = Tree(values={name: values[name] for name in blocks}, origins={})
    for problem in masked_problems(tree):
        raise UserError(problem.field, problem.value, problem.why, problem.fix)
