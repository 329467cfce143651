"""Files, includes, Hydra config groups and overrides become one tree with origins."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import did_you_mean
from luyen.base.input_files import exists, is_directory, is_file, read_text
from luyen.base.rundir import RunDirectory
from luyen.config.fields import all_blocks, all_fields
from luyen.config.loader.aliases import with_our_names
from luyen.config.loader.deprecated import with_new_names
from luyen.config.loader.one_reading import known_text
from luyen.config.loader.paths import as_started, resolve_relative_paths, with_file_entries
from luyen.config.loader.tree import ConfigTree, NestedDict, leaves, merge, nested, removed
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.problem import COMMAND_LINE, Origin, Problem, Severity

# Hydra's config groups: `group=name` picks `group/name.yaml` in the folder of the configuration.
#
# The keys of the file go below the group's name, or where its first comment `# @package`
# puts them: `_global_` is the root.

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_PREFIXES = ("optional ", "override ")


def group_file(folder: Path, group: str, name: str) -> Path | None:
    """The file of a choice; None where there is none."""
    for ending in (".yaml", ".yml"):
        file = folder / group / f"{name}{ending}"
        if is_file(str(file)):
            return file
    return None


def choices_in(folder: Path, group: str) -> list[str]:
    """Names that can be chosen in a group; none where there is no such folder."""
    place = folder / group
    if not is_directory(str(place)):
        return []
    return sorted(file.stem for file in place.iterdir() if file.suffix in (".yaml", ".yml"))


def group_name(written: str) -> str:
    """The group of an entry, without Hydra's words about it and without its package."""
    for prefix in _PREFIXES:
        written = written.removeprefix(prefix)
    return written.lstrip("/").partition("@")[0]


def chosen_groups(overrides: list[str], folders: list[Path]) -> dict[str, str]:
    """Group -> name for the overrides that choose one: a folder has the name of the key.

    A key of the configuration is always that key.
    """
    found: dict[str, str] = {}
    for text in overrides:
        key, equals, name = text.lstrip("+").partition("=")
        group = group_name(key)
        is_key = group.replace("/", ".") in all_fields() or not equals or not name
        if is_key or group.startswith("~") or not re.fullmatch(r"[\w/-]+", group):
            continue
        if any(choices_in(folder, group) for folder in folders):
            found[group] = name
    return found


def in_package(tree: ConfigTree, file: Path, group: str) -> ConfigTree:
    """What a group's file says, at its place in the whole."""
    said = _PACKAGE.search(read_text(file)[:1000])
    package = said[1] if said else group.replace("/", ".")
    package = package.replace("_group_", group.replace("/", "."))
    if package == "_global_":
        return tree
    at = package.removeprefix("_global_.")
    values = nested(at.split("."), tree.values)
    origins = {f"{at}.{path}": origin for path, origin in tree.origins.items()}
    return replace(tree, values=values, origins=origins)


MOST_FILES = 100
"""Files that one may include, each counted as often as it is named."""
DEEPEST = 10
"""Files through which one may be included."""
_LONGEST = 100
"""Names in the key of an override: far beyond any block there is."""
_VERL_BASES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")


def load(
    files: Sequence[Path],
    overrides: Sequence[str],
    *,
    below: ConfigTree | None = None,
    reads_environment: bool = True,
) -> ConfigTree:
    """Later files win over earlier ones, overrides over all; `${...}` is resolved at the end.

    `below` gives values for keys that are not written. A caller that only shows a configuration
    leaves the environment unread: references stay.
    """
    folders = [path.parent for path in files if not _is_of_run(path)]  # whose run it may be
    chosen = chosen_groups(list(overrides), folders)
    reading = _Reading(chosen)
    given = [] if below is None else [below]
    trees = [_started(path, reading.read(path)) for path in files]
    trees += [reading.choose(group, name, folders) for group, name in reading.left.items()]
    words = [o for o in overrides if group_name(o.partition("=")[0].lstrip("+")) not in chosen]
    dropped = [text for text in words if text.startswith("~")]
    whole = without(merge([*given, *trees]), dropped)
    more = [read_override(text) for text in words if text not in dropped]
    return load_trees([whole, *more], reads_environment=reads_environment)


def read_file(path: Path) -> ConfigTree:
    """What a file says, with what it includes; of a run's own file, what its user had written."""
    return _started(path, _Reading().read(path))


def _started(path: Path, tree: ConfigTree) -> ConfigTree:
    return as_started(tree, RunDirectory(path.parent)) if _is_of_run(path) else tree


def _is_of_run(path: Path) -> bool:
    run = RunDirectory(path.parent)
    return path.name == run.config.name and run.exists


def without(tree: ConfigTree, words: Sequence[str]) -> ConfigTree:
    """The tree without the keys and blocks that Hydra's `~key` names; a problem for none there."""
    for text in words:
        key, equals, value = text.removeprefix("~").partition("=")
        below = {path: one for path, one in leaves(tree.values) if f"{path}.".startswith(f"{key}.")}
        if not below or (equals and [str(one) for one in below.values()] != [value]):
            why, fix = "no file says it, so it cannot be taken back", "drop the word"
            failed = _failed(text, "C011", why, fix, text, COMMAND_LINE)
            tree = replace(tree, problems=(*tree.problems, *failed.problems))
            continue
        origins = {p: at for p, at in tree.origins.items() if not f"{p}.".startswith(f"{key}.")}
        tree = replace(tree, values=removed(tree.values, key.split(".")), origins=origins)
    return tree


def load_trees(trees: Sequence[ConfigTree], *, reads_environment: bool = True) -> ConfigTree:
    """Later trees laid over earlier ones, with `${...}` resolved and paths where files are."""
    whole = merge(trees)
    if not any("${" in str(value) for _, value in leaves(whole.values)):
        return resolve_relative_paths(with_file_entries(with_our_names(with_new_names(whole))))
    # OmegaConf takes a tenth of a second to import: only a file that interpolates pays for it.
    from luyen.config.loader.interpolate import interpolate, refuse_floods

    resolved = interpolate(refuse_floods(whole), reads_environment=reads_environment)
    return resolve_relative_paths(with_file_entries(with_our_names(with_new_names(resolved))))


@final
class _Reading:
    """Reads a file and its includes, recursively and with limits on number and depth."""

    def __init__(self, chosen: dict[str, str] | None = None) -> None:
        """`chosen` are config groups of the command line: name of the group -> of the choice."""
        self._files = 0
        self._chosen = chosen or {}
        self.left = dict(self._chosen)
        """Groups that no `defaults` list has used yet."""

    def choose(self, group: str, name: str, folders: Sequence[Path]) -> ConfigTree:
        """What a choice of the command line says, from the first folder that has it."""
        for folder in folders:
            file = group_file(folder, group, name)
            if file is not None:
                return in_package(self.read(file), file, group)
        known = sorted({one for folder in folders for one in choices_in(folder, group)})
        fix = did_you_mean(name, known)
        return _failed(group, "C003", "no such choice", fix, name, COMMAND_LINE)

    def read(
        self, path: Path, parents: tuple[Path, ...] = (), at: Origin | None = None
    ) -> ConfigTree:
        """The tree of a file; `parents` are the files that include it, `at` the line that does."""
        field = "defaults" if parents else str(path)
        place, text = path, ""
        try:
            place = path.resolve()
            wrong = self._too_many(path, place, parents)
            text = "" if wrong else known_text(path) or read_text(path)
        except (OSError, ValueError, RuntimeError) as error:  # also a NUL, a circle of links
            prefix = f"{path} " if parents else ""
            wrong = f"{prefix}cannot be read: {error}", "give a readable YAML file"
        if wrong is not None:
            return _failed(field, "C003", *wrong, str(path) if parents else None, at)
        own = read_tree(text, str(path))
        own = replace(own, values=_without_empty_blocks(own.values))
        if "defaults" not in own.values:
            return own
        return self._with_defaults(own, path, (*parents, place))

    def _too_many(
        self, path: Path, place: Path, parents: tuple[Path, ...]
    ) -> tuple[str, str] | None:
        """Why this file is not read as well, and what to do."""
        self._files += 1
        if place in parents:
            chain = " -> ".join(str(p) for p in (*parents, path))
            return f"the files include each other: {chain}", "cut the circle"
        if len(parents) > DEEPEST:
            return f"included through more than {DEEPEST} files", "include it more directly"
        if self._files > MOST_FILES + 1:
            why = f"more than {MOST_FILES} files are included, each as often as it is named"
            return why, "write what they have in common into one file"
        return None

    def _with_defaults(self, own: ConfigTree, path: Path, parents: tuple[Path, ...]) -> ConfigTree:
        """The tree laid over, or where it says `_self_` between, what its `defaults` name."""
        entries = own.values.pop("defaults")
        origin = own.origins["defaults"]
        listed = cast(list[Any], entries) if isinstance(entries, list) else [entries]
        if "_self_" not in listed:
            listed.append("_self_")
        parts: list[ConfigTree] = []
        for entry in listed:
            parts.append(own if entry == "_self_" else self._include(entry, path, parents, origin))
            if self._files > MOST_FILES + 1:
                break  # reported once, not for each further file
        return merge(parts)

    def _include(
        self, entry: Any, path: Path, parents: tuple[Path, ...], origin: Origin
    ) -> ConfigTree:
        """One entry of `defaults`: a file relative to the including one, or a base of verl."""
        if isinstance(entry, str):
            for name in (entry, f"{entry}.yaml", f"{entry}.yml"):
                sibling = str(path.parent / name)
                if exists(sibling) and not is_directory(sibling):
                    return self.read(Path(sibling), parents, origin)
            if entry in _VERL_BASES:
                why = "verl's base configuration: Luyen's own defaults take its place"
                return _failed("defaults", "C012", why, "", entry, origin, severity="note")
        if isinstance(entry, dict) and len(cast(NestedDict, entry)) == 1:
            return self._include_group(cast(NestedDict, entry), path, parents, origin)
        self._files += 1
        why, fix = f"no such file in the folder of {path.name}", "give a path relative to this file"
        return _failed("defaults", "C003", why, fix, entry, origin)

    def _include_group(
        self, entry: NestedDict, path: Path, parents: tuple[Path, ...], origin: Origin
    ) -> ConfigTree:
        """`- group: name`, or what the command line chose in its place."""
        [(written, name)] = entry.items()
        group = group_name(written)
        self.left.pop(group, None)
        name = self._chosen.get(group, name)
        if name is None or name == "null":
            return ConfigTree(values={}, origins={})
        file = group_file(path.parent, group, str(name))
        if file is not None:
            return in_package(self.read(file, parents, origin), file, group)
        self._files += 1
        if written.startswith("optional "):
            return ConfigTree(values={}, origins={})
        known = choices_in(path.parent, group)
        why = f"no such choice in the folder {group} next to {path.name}"
        return _failed("defaults", "C003", why, did_you_mean(str(name), known), entry, origin)


def _without_empty_blocks(values: NestedDict, path: str = "") -> NestedDict:
    """The values without blocks that hold no key: `data:` alone takes nothing back."""
    kept: NestedDict = {}
    for name, value in values.items():
        below = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            kept[name] = _without_empty_blocks(cast(NestedDict, value), below)
        elif value is not None or below not in all_blocks():
            kept[name] = value
    return kept


def _failed(
    field: str,
    rule: str,
    why: str,
    fix: str,
    value: Any = None,
    origin: Origin | None = None,
    severity: Severity = "error",
) -> ConfigTree:
    where = origin or Origin(source=field)
    problem = Problem(
        id=rule, severity=severity, field=field, value=value, why=why, fix=fix, origin=where
    )
    return ConfigTree(values={}, origins={}, problems=(problem,))


def read_override(text: str) -> ConfigTree:
    """`a.b=value`; Hydra's leading + or ++ is accepted, since both mean to set it here."""
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
    return ConfigTree(values=values, origins=dict.fromkeys(written, COMMAND_LINE))
