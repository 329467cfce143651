"""Paths are meant from the file that names them, those of the command line from where one stands.

A path that is there is made absolute, so that the configuration, and the copy of it that a run
keeps, means the same from every folder. A path that is only there from the working directory is
taken with a note. Everything else (a hub id, an address, a path that leads nowhere) stays as it is
written. Folders that runs write to (`trainer.default_local_dir`) begin at the working directory.
"""

import os
from dataclasses import replace
from typing import Any, cast

from luyen.base.paths import exists, expanded
from luyen.config.problem import COMMAND_LINE, DEFAULT, Origin, Problem
from luyen.config.run_paths import FILES, MODELS
from luyen.config.tree import Mapping, Tree, origin_of, replaced

_WRITTEN = ("reward.cache.path", "trainer.profile.save_path", "trainer.default_local_dir")
PATHS = tuple(key for key in (*FILES, *MODELS) if key not in _WRITTEN)
"""Keys whose values are paths of files that a run reads."""


def with_places(tree: Tree) -> Tree:
    """The tree with absolute paths where files are, and a note where only luck found one."""
    values, problems = tree.values, list(tree.problems)
    for path in PATHS:
        written = _written(values, path.split("."))
        origin = origin_of(path, tree.origins)
        if written is None or origin == DEFAULT:
            continue
        listed = cast(list[Any], written) if isinstance(written, list) else [written]
        found = [_place(one, origin) for one in listed]
        problems += [_note(path, one, origin) for one in found if one is not None and one[1]]
        places = [one if at is None else at[0] for one, at in zip(listed, found, strict=True)]
        if places != listed:
            new = places if isinstance(written, list) else places[0]
            values = replaced(values, path.split("."), new)
    return replace(tree, values=values, problems=tuple(problems))


def _written(values: Mapping, names: list[str]) -> Any:
    found: Any = values
    for name in names:
        if not isinstance(found, dict) or name not in found:
            return None
        found = cast(Mapping, found)[name]
    return found


def _place(written: Any, origin: Origin) -> tuple[str, bool] | None:
    """The absolute path, and whether it is only there by luck; None where the value stays."""
    if not isinstance(written, str) or not written or _is_other(written):
        return None
    beside = os.path.dirname(origin.source) if origin != COMMAND_LINE else ""
    from_file = os.path.join(beside, written)
    if exists(from_file):
        return os.path.abspath(from_file), False
    return (os.path.abspath(written), True) if exists(written) else None


def _is_other(written: str) -> bool:
    is_named = "://" in written or written.startswith("artifact:") or "${" in written
    return is_named or expanded(written).is_absolute()


def _note(path: str, place: tuple[str, bool], origin: Origin) -> Problem:
    folder = os.path.abspath(os.path.dirname(origin.source))
    why = f"there is no such file beside {origin.source}; the one in the working directory is taken"
    fix = f"write {os.path.relpath(place[0], folder)}, which holds from every folder"
    return Problem(
        id="C015", severity="note", field=path, value=place[0], why=why, fix=fix, origin=origin
    )
