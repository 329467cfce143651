"""Hydra's config groups: `group=name` picks `group/name.yaml` beside the configuration.

What the file says stands below the group's name, or where its first comment `# @package` says:
`_global_` is the root.
"""

import re
from dataclasses import replace
from pathlib import Path

from luyen.base.paths import is_directory, is_file
from luyen.base.reading import read_text
from luyen.config.fields import all_fields
from luyen.config.tree import Tree, nested

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


def in_package(tree: Tree, file: Path, group: str) -> Tree:
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
