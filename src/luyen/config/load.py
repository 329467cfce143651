"""Files, includes, interpolation and `key=value` overrides become one tree with origins."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from luyen.config.fields import all_blocks
from luyen.config.problem import COMMAND_LINE, Origin, Problem, Severity
from luyen.config.tree import Mapping, Tree, leaves, merge, nested
from luyen.config.yaml_tree import read_tree

_LONGEST = 100
"""Names in the key of an override: far beyond any block there is."""
_VERL_BASES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")


def load(files: Sequence[Path], overrides: Sequence[str]) -> Tree:
    """Later files win over earlier ones, overrides over all; `${...}` is resolved at the end."""
    trees = [read_file(path) for path in files]
    return load_trees([*trees, *(read_override(text) for text in overrides)])


def read_file(path: Path) -> Tree:
    """What a file says, with what it includes."""
    return _read_file(path, ())


def load_trees(trees: Sequence[Tree]) -> Tree:
    """Later trees laid over earlier ones, with `${...}` resolved."""
    whole = merge(trees)
    if not any("${" in str(value) for _, value in leaves(whole.values)):
        return whole
    # OmegaConf takes a tenth of a second to import: only a file that interpolates pays for it.
    from luyen.config.interpolate import interpolate

    return interpolate(whole)


def _read_file(path: Path, parents: tuple[Path, ...]) -> Tree:
    if path.resolve() in parents:
        chain = " -> ".join(str(p) for p in (*parents, path))
        return _failed(
            str(path), "C003", f"the files include each other: {chain}", "cut the circle"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return _failed(str(path), "C003", f"cannot be read: {error}", "give a readable YAML file")
    own = read_tree(text, str(path))
    own = replace(own, values=_without_empty_blocks(own.values))
    if "defaults" not in own.values:
        return own
    entries = own.values.pop("defaults")
    origin = own.origins["defaults"]
    listed = cast(list[Any], entries) if isinstance(entries, list) else [entries]
    if "_self_" not in listed:
        listed.append("_self_")
    parts = [
        own if entry == "_self_" else _include(entry, path, (*parents, path.resolve()), origin)
        for entry in listed
    ]
    return merge(parts)


def _without_empty_blocks(values: Mapping, path: str = "") -> Mapping:
    """The values without blocks that hold no key: `data:` alone takes nothing back."""
    kept: Mapping = {}
    for name, value in values.items():
        below = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            kept[name] = _without_empty_blocks(cast(Mapping, value), below)
        elif value is not None or below not in all_blocks():
            kept[name] = value
    return kept


def is_file(path: Path) -> bool:
    """Whether a file is there; False for a text that no file could be called."""
    try:
        return path.is_file()
    except OSError:
        return False


def _include(entry: Any, path: Path, parents: tuple[Path, ...], origin: Origin) -> Tree:
    """One line of a `defaults` list: a file beside the including one, or verl's base by name."""
    if isinstance(entry, str):
        for name in (entry, f"{entry}.yaml", f"{entry}.yml"):
            if is_file(path.parent / name):
                return _read_file(path.parent / name, parents)
        if entry in _VERL_BASES:
            why = "verl's base configuration: Luyen's own defaults take its place"
            return _failed("defaults", "C012", why, "", entry, origin, severity="note")
        why = f"no such file beside {path.name}"
        return _failed("defaults", "C003", why, "give a path relative to this file", entry, origin)
    why = "a Hydra config group; includes here are plain YAML files"
    return _failed("defaults", "C003", why, "write the group's keys into this file", entry, origin)


def _failed(
    field: str,
    rule: str,
    why: str,
    fix: str,
    value: Any = None,
    origin: Origin | None = None,
    severity: Severity = "error",
) -> Tree:
    where = origin or Origin(source=field)
    problem = Problem(
        id=rule, severity=severity, field=field, value=value, why=why, fix=fix, origin=where
    )
    return Tree(values={}, origins={}, problems=(problem,))


def read_override(text: str) -> Tree:
    """`a.b=value`; Hydra's leading + or ++ is accepted, since it means the same here."""
    path, equals, raw = text.lstrip("+").partition("=")
    names = path.split(".")
    if not equals or not all(names) or len(names) > _LONGEST or path.startswith("~"):
        why = "not of the form key=value"
        fix = "write e.g. actor_rollout_ref.rollout.n=8"
        return _failed(text, "C011", why, fix, text, COMMAND_LINE)
    found = read_tree(f"value: {raw}" if raw else "value:", "command line")
    if found.problems or list(found.values) != ["value"]:
        why = found.problems[0].why if found.problems else "it holds more than one value"
        fix = "quote the value for YAML and for the shell"
        return _failed(path, "C011", why, fix, raw, COMMAND_LINE)
    values = nested(names, found.values["value"])
    written = [path, *(below for below, _ in leaves(values))]
    return Tree(values=values, origins=dict.fromkeys(written, COMMAND_LINE))
