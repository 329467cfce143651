"""A raw tree becomes a frozen `RunConfig`; every unknown key and wrong value is collected."""

from dataclasses import dataclass
from typing import Any, cast, final

from pydantic import ValidationError

from luyen.base.suggest import near_names
from luyen.config import verl_keys
from luyen.config.fields import FieldInfo, all_blocks, all_fields, children
from luyen.config.foreign_keys import FOREIGN
from luyen.config.problem import Problem, Severity
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Mapping, Tree, leaves, origin_of, removed, value_in

_MOST_PROBLEMS = 200
_KEYS_SHOWN = 12
"""Unknown keys that are listed: each is compared with all that are known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A configuration and what was wrong with the text it came from.

    Example:
        >>> parsed = parse(Tree(values={"trainer": {"nnodes": 2}}, origins={}))
        >>> parsed.config.trainer.nnodes, parsed.problems
        (2, ())
    """

    config: RunConfig
    """Valid: what was wrong stands at its default, so that later rules still have their say."""
    problems: tuple[Problem, ...]
    """Unknown keys, wrong types, values out of range."""


def parse(tree: Tree) -> Parsed:
    """Validate a tree against the schema, reporting everything at once."""
    problems: list[Problem] = []
    known = _known_part(tree.values, "", tree, problems)
    if len(problems) >= _MOST_PROBLEMS:
        why = f"there are {len(problems)} problems with keys: what comes after them is not listed"
        problems.append(_problem("C005", problems[-1].field, None, why, "mend these first", tree))
    config, found = _validated(known, tree)
    config = config.with_references(tree.references)
    return Parsed(config=config, problems=(*problems, *found))


def _known_part(values: Mapping, block: str, tree: Tree, problems: list[Problem]) -> Mapping:
    """The keys that exist; a problem for each that does not."""
    kept: Mapping = {}
    for name, value in values.items():
        path = f"{block}.{name}" if block else name
        if path in all_blocks():
            if isinstance(value, dict):
                kept[name] = _known_part(cast(Mapping, value), path, tree, problems)
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


def _unknown(path: str, value: Any, tree: Tree) -> list[Problem]:
    """A typing error, a verl key, or something else: each gets its own answer."""
    block, _, name = path.rpartition(".")
    siblings = near_names(name, children(block))
    is_elsewhere = name in FOREIGN and (not block or block in all_blocks())
    if is_elsewhere and not verl_keys.is_verl(path):
        why = "unknown key; a name of TRL, LLaMA-Factory or Axolotl"
        return [_problem("C005", path, value, why, f"write {FOREIGN[name]}", tree)]
    if siblings and not verl_keys.is_verl(path):
        return [_unknown_key(path, value, [f"{block}.{s}" if block else s for s in siblings], tree)]
    if name == "_target_" or path.startswith("hydra"):
        why = "a Hydra setting; types and search paths need no declaration here"
        return [_problem("C012", path, value, why, "drop the line", tree, severity="warning")]
    if isinstance(value, dict) and value and verl_keys.nearest(path) is not None:
        inner = leaves(cast(Mapping, value), path)
        return [problem for below, leaf in inner for problem in _verl(below, leaf, tree)]
    if verl_keys.is_verl(path):
        return _verl(path, value, tree)
    elsewhere = [p for p in (*all_fields(), *all_blocks()) if p.rpartition(".")[2] == name]
    return [_unknown_key(path, value, elsewhere or _near_paths(name), tree)]


def _verl(path: str, value: Any, tree: Tree) -> list[Problem]:
    if verl_keys.is_noted(path, value):
        _, reason = verl_keys.NOTED[path]
        return [_problem("C010", path, value, reason, "drop the line", tree, severity="note")]
    if path in verl_keys.MOOT:
        accepted, reason = verl_keys.MOOT[path]
        if any(value is v or (value == v and type(value) is type(v)) for v in accepted):
            return []
        only = " or ".join(repr(v) for v in accepted)
        return [_problem("C010", path, value, reason, f"drop the line, or set it to {only}", tree)]
    instead = verl_keys.nearest(path) or "nothing yet"
    why = "a key of verl that Luyen does not have"
    return [_problem("C007", path, value, why, f"nearest here: {instead}", tree)]


def _near_paths(name: str) -> list[str]:
    tails = {p: p.rpartition(".")[2] for p in all_fields()}
    near = near_names(name, set(tails.values()))
    return [path for tail in near for path, last in tails.items() if last == tail][:3]


def _unknown_key(path: str, value: Any, near: list[str], tree: Tree) -> Problem:
    if near:
        fix = "did you mean " + " or ".join(f"`{p}`" for p in near[:3]) + "?"
    else:
        block = path.rpartition(".")[0]
        known = children(block)
        more = f", and {len(known) - _KEYS_SHOWN} more" if len(known) > _KEYS_SHOWN else ""
        fix = f"keys of `{block or 'the root'}`: {', '.join(known[:_KEYS_SHOWN])}{more}"
    return _problem("C005", path, value, "unknown key", fix, tree)


def _validated(values: Mapping, tree: Tree) -> tuple[RunConfig, list[Problem]]:
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
    ours = verl_keys.CHANGED_VALUES.get(info.path, {}).get(str(value))
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
    tree: Tree,
    severity: Severity = "error",
) -> Problem:
    origin = origin_of(path, tree.origins)
    return Problem(
        id=rule, severity=severity, field=path, value=value, why=why, fix=fix, origin=origin
    )
