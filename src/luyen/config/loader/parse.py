"""A tree becomes a frozen `RunConfig` and back: unknown keys reported, secrets masked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

from pydantic import ValidationError

from luyen.base.errors import UserError, near_names
from luyen.base.secrets import MASK, has_masked_url, masked_tree, masked_urls, remember
from luyen.config.fields import FieldInfo, all_blocks, all_fields, children
from luyen.config.loader import aliases
from luyen.config.loader.aliases import FOREIGN
from luyen.config.loader.tree import (
    ConfigTree,
    NestedDict,
    leaves,
    origin_of,
    removed,
    replaced,
    value_in,
)
from luyen.config.problem import Problem, Severity
from luyen.config.schema.run import RunConfig

_MOST_PROBLEMS = 200
_MAX_LISTED_KEYS = 12
"""Unknown keys that are listed: each is compared with all that are known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ParseResult:
    """A configuration and what was wrong with the text it came from.

    Example:
        >>> parsed = parse(ConfigTree(values={"trainer": {"nnodes": 2}}, origins={}))
        >>> parsed.config.trainer.nnodes, parsed.problems
        (2, ())
    """

    config: RunConfig
    """Valid: invalid values are replaced by defaults, so that rules can still run."""
    problems: tuple[Problem, ...]
    """Unknown keys, wrong types, values out of range."""


def parse(tree: ConfigTree) -> ParseResult:
    """Validate a tree against the schema, reporting everything at once."""
    problems: list[Problem] = []
    known = _existing_keys(tree.values, "", tree, problems)
    if len(problems) >= _MOST_PROBLEMS:
        why = f"there are {len(problems)} problems with keys: what comes after them is not listed"
        problems.append(_problem("C005", problems[-1].field, None, why, "fix these first", tree))
    config, found = _validated(known, tree)
    config = config.with_references(tree.references)
    return ParseResult(config=config, problems=(*problems, *found))


def _existing_keys(
    values: NestedDict, block: str, tree: ConfigTree, problems: list[Problem]
) -> NestedDict:
    """The keys that exist; a problem for each that does not."""
    kept: NestedDict = {}
    for name, value in values.items():
        path = f"{block}.{name}" if block else name
        if path in all_blocks():
            if isinstance(value, dict):
                kept[name] = _existing_keys(cast(NestedDict, value), path, tree, problems)
            elif value is not None:
                inner = ", ".join(children(path)[:4])
                why = f"`{path}` is a block of keys, not a value"
                fix = f"write keys below it: {inner}, ..."
                problems.append(_problem("C006", path, value, why, fix, tree))
        elif path not in all_fields():
            if len(problems) < _MOST_PROBLEMS:
                problems += _unknown(path, value, tree)
        elif value == "???":
            why, fix = "the value is left open (`???`)", f"set {path}"
            problems.append(_problem("C004", path, value, why, fix, tree))
        else:
            kept[name] = value
    return kept


def _unknown(path: str, value: Any, tree: ConfigTree) -> list[Problem]:
    """A typing error, a verl key, or something else: each gets its own answer."""
    block, _, name = path.rpartition(".")
    siblings = near_names(name, children(block))
    is_foreign = name in FOREIGN and (not block or block in all_blocks())
    if is_foreign and not aliases.is_verl(path):
        why = "unknown key; a name of TRL, LLaMA-Factory or Axolotl"
        return [_problem("C005", path, value, why, f"write {FOREIGN[name]}", tree)]
    if siblings and not aliases.is_verl(path):
        return [_unknown_key(path, value, [f"{block}.{s}" if block else s for s in siblings], tree)]
    if name == "_target_" or path.startswith("hydra"):
        why = "a Hydra setting; types and search paths need no declaration here"
        return [_problem("C012", path, value, why, "drop the line", tree, severity="warning")]
    if isinstance(value, dict) and value and aliases.nearest(path) is not None:
        inner = leaves(cast(NestedDict, value), path)
        return [problem for below, leaf in inner for problem in _verl(below, leaf, tree)]
    if aliases.is_verl(path):
        return _verl(path, value, tree)
    same_name = [p for p in (*all_fields(), *all_blocks()) if p.rpartition(".")[2] == name]
    return [_unknown_key(path, value, same_name or _near_paths(name), tree)]


def _verl(path: str, value: Any, tree: ConfigTree) -> list[Problem]:
    if aliases.is_noted(path, value):
        _, reason = aliases.NOTED[path]
        return [_problem("C010", path, value, reason, "drop the line", tree, severity="note")]
    if path in aliases.MOOT:
        accepted, reason = aliases.MOOT[path]
        if any(value is v or (value == v and type(value) is type(v)) for v in accepted):
            return []
        only = " or ".join(repr(v) for v in accepted)
        return [_problem("C010", path, value, reason, f"drop the line, or set it to {only}", tree)]
    instead = aliases.nearest(path) or "nothing yet"
    why = "a key of verl that Luyen does not have"
    return [_problem("C007", path, value, why, f"nearest here: {instead}", tree)]


def _near_paths(name: str) -> list[str]:
    tails = {p: p.rpartition(".")[2] for p in all_fields()}
    near = near_names(name, set(tails.values()))
    return [path for tail in near for path, last in tails.items() if last == tail][:3]


def _unknown_key(path: str, value: Any, near: list[str], tree: ConfigTree) -> Problem:
    if near:
        fix = "did you mean " + " or ".join(f"`{p}`" for p in near[:3]) + "?"
    else:
        block = path.rpartition(".")[0]
        known = children(block)
        more = (
            f", and {len(known) - _MAX_LISTED_KEYS} more" if len(known) > _MAX_LISTED_KEYS else ""
        )
        fix = f"keys of `{block or 'the root'}`: {', '.join(known[:_MAX_LISTED_KEYS])}{more}"
    return _problem("C005", path, value, "unknown key", fix, tree)


def _validated(values: NestedDict, tree: ConfigTree) -> tuple[RunConfig, list[Problem]]:
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        wrong = dict.fromkeys(_field_of(found["loc"]) for found in error.errors())
    problems: list[Problem] = []
    for path in wrong:
        info = all_fields()[path]
        value = value_in(values, path)
        why = f"expected {info.kind}"
        problems.append(_problem("C006", path, value, why, _right_value(info, value), tree))
        values = removed(values, path.split("."))
    return RunConfig.model_validate(values), problems


def _right_value(info: FieldInfo, value: Any) -> str:
    """The word the user probably meant, where the key takes one of a few."""
    ours = aliases.CHANGED_VALUES.get(info.path, {}).get(str(value))
    if ours is not None:
        return f"write `{ours}` for verl's `{value}`"
    near = near_names(str(value), info.choices)
    return f"did you mean `{near[0]}`?" if near else f"see `luyen explain {info.path}`"


def _field_of(location: tuple[int | str, ...]) -> str:
    """The longest part of an error's location that is a key."""
    for end in range(len(location), 0, -1):
        path = ".".join(str(part) for part in location[:end])
        if path in all_fields():
            return path
    raise AssertionError(f"validation failed outside of any key: {location}")


def _problem(
    rule: str,
    path: str,
    value: Any,
    why: str,
    fix: str,
    tree: ConfigTree,
    severity: Severity = "error",
) -> Problem:
    origin = origin_of(path, tree.origins)
    return Problem(
        id=rule, severity=severity, field=path, value=value, why=why, fix=fix, origin=origin
    )


# What of a configuration may be stored, compared and shown: secrets are masked.
#
# A value that came from the environment stays the reference that was written: the file that
# holds it holds no secret, and a later reader resolves it from its own environment. Numbers,
# booleans and words of a fixed set are no secrets, and a run must be repeatable without its
# shell: their values are written.


def stored_values(config: RunConfig) -> NestedDict:
    """The configuration as files hold it: environment as references, no password in an address.

    Example:
        >>> stored_values(RunConfig()) == RunConfig().model_dump(mode="json")
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
    return cast(NestedDict, _without_passwords(values))


def masked_values(config: RunConfig) -> NestedDict:
    """The configuration as people and remote loggers see it: values of secret names masked too."""
    return masked_tree(stored_values(config))


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
        return {k: _without_passwords(v) for k, v in cast(NestedDict, value).items()}
    if isinstance(value, list):
        return [_without_passwords(inner) for inner in cast(list[Any], value)]
    return value


def remember_secrets(config: RunConfig) -> None:
    """Have no message of this process show what keys of secret names hold."""
    for path, value in leaves(config.model_dump(mode="json")):
        if masked_tree(value, path.rpartition(".")[2]) == MASK:
            remember(str(value))


def masked_problems(tree: ConfigTree) -> Iterator[Problem]:
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
    tree = ConfigTree(values={name: values[name] for name in blocks}, origins={})
    for problem in masked_problems(tree):
        raise UserError(problem.field, problem.value, problem.why, problem.fix)
