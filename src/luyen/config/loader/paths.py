"""Keys that hold paths, and the folder that a relative path starts from.

A run is started in a folder, and its configuration may name rows, code and models below it. Who
reads that configuration later, from wherever, means the same files.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import exists, expanded
from luyen.base.rundir import RunDirectory
from luyen.config.loader.tree import ConfigTree, NestedDict, merged, origin_of, replaced, value_in
from luyen.config.problem import COMMAND_LINE, DEFAULT, Origin, Problem

_TURNS = "actor_rollout_ref.rollout.multi_turn"
FILES = (
    "data.train_files",
    "data.val_files",
    "data.sampler.class_path",
    f"{_TURNS}.tool_config_path",
    f"{_TURNS}.function_tool_path",
    f"{_TURNS}.interaction_config_path",
    "reward.custom_reward_function.path",
    "reward.cache.path",
    "trainer.plugins",
    "trainer.profile.save_path",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
)
"""Keys that hold a path, or several; one with `://` in it is an address."""
MODELS = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.model.lora_adapter_path",
    "actor_rollout_ref.ref.path",
    "critic.model.path",
    "distill.teacher_path",
    "reward.reward_model.model_path",
)
"""Keys that hold a folder or a name on the hub: a folder is one that is there."""
ARGUMENTS = (
    "reward.custom_reward_function.reward_kwargs",
    "reward.components",
    "data.sampler.kwargs",
    f"{_TURNS}.environments",
)
"""Keys with arguments of components, which may name files."""
_ENDINGS = (".py", ".yaml", ".yml", ".json", ".jsonl", ".csv", ".txt", ".parquet")


def as_started(tree: ConfigTree, directory: RunDirectory) -> ConfigTree:
    """The configuration of a run as it was given: paths begin where the run was started.

    A run's file holds every key. Those that its user wrote are known from its provenance, where
    that can be read; the rest are defaults.
    """
    if not directory.exists:
        return tree
    try:
        written = directory.read_provenance()
        tree = replace(tree, origins={k: o for k, o in tree.origins.items() if k in written})
    except UserError:
        pass  # damaged: every key counts as written
    tree = _with_own_inputs(tree, directory)
    folder = start_folder(directory)
    is_other_folder = folder is not None and folder != Path.cwd()
    return with_absolute_paths(tree, folder) if folder is not None and is_other_folder else tree


def _with_own_inputs(tree: ConfigTree, directory: RunDirectory) -> ConfigTree:
    """The tree with the inputs of a run that was moved where they are now."""
    values = tree.values
    for key in (*FILES, *MODELS):
        try:
            written = value_in(values, key)
        except (KeyError, TypeError):
            continue
        values = replaced(values, [*key.split(".")], _moved(written, directory.inputs))
    return replace(tree, values=values)


def _moved(value: Any, inputs: Path) -> Any:
    """A path below a folder `inputs` that is gone, in the folder of a run that has it."""
    if isinstance(value, list):
        return [_moved(inner, inputs) for inner in cast(list[Any], value)]
    if not isinstance(value, str) or Path(value).parent.name != inputs.name or exists(value):
        return cast(Any, value)
    place = (inputs / Path(value).name).absolute()
    return str(place) if place.exists() else value


def with_absolute_paths(tree: ConfigTree, folder: Path) -> ConfigTree:
    """The tree with the paths that begin at `folder` written from the root on."""
    values = tree.values
    for key in (*FILES, *MODELS, *ARGUMENTS):
        try:
            written = value_in(values, key)
        except (KeyError, TypeError):
            continue
        values = replaced(values, [*key.split(".")], whole(key, written, folder))
    return replace(tree, values=values)


def whole(key: str, value: Any, folder: Path) -> Any:
    """The value of a key with every relative path in it written from the root on.

    Example:
        >>> whole("data.train_files", ["rows.jsonl", "arithmetic://sum"], Path("/a"))
        ['/a/rows.jsonl', 'arithmetic://sum']
        >>> whole("trainer.seed", 3, Path("/a"))
        3
    """
    if isinstance(value, str):
        return _placed(key, value, folder)
    if isinstance(value, list | tuple):
        return [whole(key, inner, folder) for inner in cast(list[Any], value)]
    if isinstance(value, dict) and key in ARGUMENTS:
        entries = cast(dict[str, Any], value)
        return {name: whole(key, inner, folder) for name, inner in entries.items()}
    return cast(Any, value)


def _placed(key: str, word: str, folder: Path) -> str:
    if key not in (*FILES, *MODELS, *ARGUMENTS) or not word or "://" in word or "\0" in word:
        return word
    path, colon, name = word.partition(".py:")
    written = f"{path}.py" if colon else word
    place = expanded(written)
    if place.is_absolute() or "${" in word or word.startswith("artifact:"):
        return word
    is_there, is_here = exists(str(folder / place)), exists(written)
    is_path = key in FILES or written.startswith(("./", "../")) or is_there
    if key in ARGUMENTS:
        is_path = is_there and written.endswith(_ENDINGS)
    if not is_path or (is_here and not is_there):
        return word
    return f"{folder / place}:{name}" if colon else str(folder / place)


def start_folder(directory: RunDirectory) -> Path | None:
    """The folder that a run was started in; None where it is not known or not there any more."""
    try:
        found = directory.read_manifest().get("folder") if directory.exists else None
    except UserError:
        return None  # damaged: reported where the manifest is needed
    return Path(found) if isinstance(found, str) and Path(found).is_dir() else None


# Paths are relative to the file that names them; on the command line, to the working
# directory.
#
# A path that is there is made absolute, so that the configuration, and the copy of it that a
# run keeps, means the same from every folder. A path that is only there from the working
# directory is taken with a note. Everything else (a hub id, an address, a path that leads
# nowhere) stays as it is written. Folders that runs write to (`trainer.default_local_dir`)
# begin at the working directory.

_OUTPUT_KEYS = ("reward.cache.path", "trainer.profile.save_path", "trainer.default_local_dir")
PATHS = tuple(key for key in (*FILES, *MODELS) if key not in _OUTPUT_KEYS)
"""Keys whose values are paths of files that a run reads."""


def resolve_relative_paths(tree: ConfigTree) -> ConfigTree:
    """The tree with absolute paths of existing files; a note for those of the working directory."""
    values, problems = tree.values, list(tree.problems)
    for path in PATHS:
        written = _value_at(values, path.split("."))
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


def _value_at(values: NestedDict, names: list[str]) -> Any:
    found: Any = values
    for name in names:
        if not isinstance(found, dict) or name not in found:
            return None
        found = cast(NestedDict, found)[name]
    return found


def _place(written: Any, origin: Origin) -> tuple[str, bool] | None:
    """The absolute path, and whether only the working directory has it; None: keep the value."""
    if not isinstance(written, str) or not written or _is_other(written):
        return None
    source_folder = os.path.dirname(origin.source) if origin != COMMAND_LINE else ""
    from_file = os.path.join(source_folder, written)
    if exists(from_file):
        return os.path.abspath(from_file), False
    return (os.path.abspath(written), True) if exists(written) else None


def _is_other(written: str) -> bool:
    is_named = "://" in written or written.startswith("artifact:") or "${" in written
    return is_named or expanded(written).is_absolute()


def _note(path: str, place: tuple[str, bool], origin: Origin) -> Problem:
    folder = os.path.abspath(os.path.dirname(origin.source))
    why = f"no such file in the folder of {origin.source}; the one in the working directory is used"
    fix = f"write {os.path.relpath(place[0], folder)}, which holds from every folder"
    return Problem(
        id="C015", severity="note", field=path, value=place[0], why=why, fix=fix, origin=origin
    )


# Entries of `data.train_files` that are mappings: their parts go to keys of their own.
#
# `{path: a.jsonl, weight: 3, max_samples: 1000, name: math}` becomes the path in
# `data.train_files` and the rest in `data.train_weights`, `data.train_file_samples` and
# `data.train_names`, which hold one value for every entry. Plain strings may stand between.

_ROWS = "data.train_files"
_PARTS = {
    "weight": ("train_weights", 1.0),
    "max_samples": ("train_file_samples", -1),
    "name": ("train_names", None),
}
"""Part of an entry -> key of `data`, and what an entry without it has."""


def with_file_entries(tree: ConfigTree) -> ConfigTree:
    """The tree with plain paths in `data.train_files`; a problem for an entry that is malformed."""
    try:
        written = value_in(tree.values, _ROWS)
    except (KeyError, TypeError):
        return tree
    entries = cast(list[Any], written if isinstance(written, list) else [written])
    if not any(isinstance(entry, dict) for entry in entries):
        return tree
    wrong = next((found for entry in entries if (found := _wrong(entry, tree))), None)
    if wrong is not None:
        why, fix = wrong
        origin = origin_of(_ROWS, tree.origins)
        problem = Problem(
            id="C017", severity="error", field=_ROWS, value=written, why=why, fix=fix, origin=origin
        )
        return replace(tree, problems=(*tree.problems, problem))
    return _split(tree, [e if isinstance(e, dict) else {"path": e} for e in entries])


def _wrong(entry: Any, tree: ConfigTree) -> tuple[str, str] | None:
    """Reason and fix where an entry is neither a path nor a mapping with one."""
    if isinstance(entry, str):
        return None
    if not isinstance(entry, Mapping) or not isinstance(
        cast(Mapping[str, Any], entry).get("path"), str
    ):
        return "an entry is a path, or a mapping with `path`", "write {path: rows.jsonl, weight: 2}"
    known = ("path", *_PARTS)
    for name in cast(Mapping[str, Any], entry):
        if name not in known:
            return f"an entry has no `{name}`", did_you_mean(str(name), known)
        taken = _PARTS[name][0] if name in _PARTS else ""
        if taken in tree.values.get("data", {}):
            return f"`{name}` of an entry is also said by data.{taken}", "keep one of the two"
    return None


def _split(tree: ConfigTree, entries: list[dict[str, Any]]) -> ConfigTree:
    found: dict[str, Any] = {"train_files": [entry["path"] for entry in entries]}
    for part, (key, absent) in _PARTS.items():
        if any(part in entry for entry in entries):
            values = [entry.get(part, absent) for entry in entries]
            found[key] = [entries[i]["path"] if v is None else v for i, v in enumerate(values)]
    origin = origin_of(_ROWS, tree.origins)
    origins = {path: at for path, at in tree.origins.items() if not path.startswith(f"{_ROWS}.")}
    origins |= {f"data.{key}": origin for key in found}
    return replace(tree, values=merged(tree.values, {"data": found}), origins=origins)
