"""Files and artifacts that a configuration names, and their fingerprints.

Code (rewards, plugins, tools, environments, samplers), lists of tools, and models. Rows are not
among them: they have a fingerprint of their own. Modules that named code imports are listed with
it, unless they are installed packages.
"""

import importlib.machinery
import os.path
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.input_files import expanded, is_file, read_text
from luyen.config.loader.tree import ConfigTree, origin_of, replaced, value_in
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.model_folder.files import model_parts
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.schema.trainer import TrainerConfig
from luyen.telemetry.artifact_registry import ArtifactRegistry
from luyen.telemetry.artifacts import Artifact
from luyen.telemetry.fingerprints import fingerprint_together, source_files

_TURNS = "actor_rollout_ref.rollout.multi_turn"
_MODEL = "actor_rollout_ref.model"
_ENDINGS = (".py", ".yaml", ".yml", ".json", ".jsonl", ".csv", ".txt", ".parquet")
"""What a word must end with to be looked for as a file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file, or the files of one part of a model, that a key names.

    Example:
        >>> NamedFile(name="trainer.plugins.0", written="a.py", files=(Path("a.py"),)).revision
    """

    name: str
    """The key, and what below it."""
    written: str
    """What the configuration says."""
    files: tuple[Path, ...] = ()
    """Its path on this machine."""
    revision: str | None = None
    """Revision of a model of the hub, which stands for the content of its files."""

    def fingerprint(self) -> str:
        """Of the content as it is now."""
        if self.revision is not None:
            return f"revision:{self.revision}"
        return fingerprint_together(self.files)


def named_fingerprints(config: RunConfig, *, folder: Path) -> dict[str, dict[str, str]]:
    """Name -> path and fingerprint of everything the configuration names; paths from `folder`.

    Example:
        >>> sorted(named_fingerprints(RunConfig(), folder=Path()))[-1]
        'actor_rollout_ref.model.path.weights'
    """
    return {
        named.name: {"path": named.written, "fingerprint": named.fingerprint()}
        for named in named_files(config, folder)
    }


def named_files(config: RunConfig, folder: Path) -> Iterator[NamedFile]:
    """Everything the configuration names; relative paths begin at `folder`."""
    for named in (*_code(config, folder), *_lists(config, folder), *_arguments(config, folder)):
        yield named
        yield from _imports_of(named)
    yield from _models(config, folder)


def _imports_of(named: NamedFile) -> Iterator[NamedFile]:
    """The modules of the user's own that a file of code imports, by their path relative to it."""
    for start in (file for file in named.files if file.suffix == ".py"):
        place = start.resolve()
        for file in sorted(source_files(place) - {place}):
            yield _at(named.name, os.path.relpath(file, place.parent), file)


def code_files(config: RunConfig, folder: Path) -> Iterator[NamedFile]:
    """Of all that the configuration names, what decides which code runs."""
    yield from _code(config, folder)
    yield from _lists(config, folder)
    yield from _arguments(config, folder)
    if config.actor_rollout_ref.model.trust_remote_code:
        for named in _models(config, folder):
            if named.name.endswith((".code", ".config")):
                yield named


def python_files(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys that name a Python file, with the path that is written there."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    keys = {
        "reward.custom_reward_function.path": config.reward.custom_reward_function.path,
        "data.sampler.class_path": config.data.sampler.class_path,
        f"{_TURNS}.function_tool_path": multi_turn.function_tool_path,
        **{f"trainer.plugins.{i}": path for i, path in enumerate(config.trainer.plugins)},
    }
    yield from ((name, path) for name, path in keys.items() if path is not None)


def _code(config: RunConfig, folder: Path) -> Iterator[NamedFile]:
    for name, path in python_files(config):
        yield NamedFile(name=name, written=path, files=(folder / expanded(path),))


def _lists(config: RunConfig, folder: Path) -> Iterator[NamedFile]:
    """Lists of tools and of user simulators, and the files that they name."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    keys = {
        f"{_TURNS}.tool_config_path": multi_turn.tool_config_path,
        f"{_TURNS}.interaction_config_path": multi_turn.interaction_config_path,
    }
    for name, path in keys.items():
        if path is None:
            continue
        file = folder / expanded(path)
        yield NamedFile(name=name, written=path, files=(file,))
        try:
            page = read_tree(read_text(file), path).values
        except OSError:
            continue  # the check names what is wrong with it
        yield from _mentioned(page, name, file.parent)


def _arguments(config: RunConfig, folder: Path) -> Iterator[NamedFile]:
    """Files among the free arguments of a component."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    keys: dict[str, Mapping[str, Any]] = {
        "reward.custom_reward_function.reward_kwargs": (
            config.reward.custom_reward_function.reward_kwargs
        ),
        "reward.components": config.reward.components,
        "data.sampler.kwargs": config.data.sampler.kwargs,
        f"{_TURNS}.environments": multi_turn.environments,
    }
    for name, arguments in keys.items():
        yield from _mentioned(arguments, name, folder)


def _models(config: RunConfig, folder: Path) -> Iterator[NamedFile]:
    arr = config.actor_rollout_ref
    has_own = arr.model.tokenizer_path is not None
    left_out = {"weights"} if arr.model.init == "random" else set[str]()
    left_out |= {"tokenizer", "template"} if has_own else set[str]()
    keys = {
        f"{_MODEL}.path": (arr.model.path, left_out),
        f"{_MODEL}.tokenizer_path": (arr.model.tokenizer_path, {"weights", "config"}),
        f"{_MODEL}.lora_adapter_path": (arr.model.lora_adapter_path, set[str]()),
        "actor_rollout_ref.ref.path": (arr.ref.path, {"tokenizer", "template"}),
        "critic.model.path": (config.critic.model.path, {"tokenizer", "template"}),
        "distill.teacher_path": (config.distill.teacher_path, {"template"}),
        "reward.reward_model.model_path": (config.reward.reward_model.model_path, set[str]()),
    }
    for name, (path, unused) in keys.items():
        if path is None:
            continue
        for part, (files, revision) in model_parts(path, folder).items():
            if part not in unused:
                yield NamedFile(name=f"{name}.{part}", written=path, files=files, revision=revision)


def _mentioned(tree: Any, name: str, folder: Path) -> Iterator[NamedFile]:
    """Words of a tree that are files: `FILE.py`, `FILE.py:NAME`, or `class_name: PACKAGE.CLASS`."""
    if isinstance(tree, Mapping):
        for key, inner in cast(Mapping[Any, Any], tree).items():
            if key == "class_name" and isinstance(inner, str) and ".py" not in inner:
                file = module_file(inner)
                yield from () if file is None else [_at(name, inner, file)]
            else:
                yield from _mentioned(inner, name, folder)
    elif isinstance(tree, list):
        for inner in cast(list[Any], tree):
            yield from _mentioned(inner, name, folder)
    elif isinstance(tree, str):
        path = tree.rpartition(":")[0] if ".py:" in tree else tree
        if path.endswith(_ENDINGS) and "\n" not in path and is_file(str(folder / expanded(path))):
            yield _at(name, path, folder / expanded(path))


def _at(name: str, written: str, file: Path) -> NamedFile:
    return NamedFile(name=f"{name}:{written}", written=written, files=(file,))


def module_file(dotted: str) -> Path | None:
    """The file of the module that a dotted name leads into, found without importing anything.

    Example:
        >>> module_file("json.decoder.JSONDecoder").name
        'decoder.py'
    """
    names = dotted.split(".")
    found, places = None, None
    for count in range(1, len(names) + 1):
        try:
            spec = importlib.machinery.PathFinder.find_spec(".".join(names[:count]), places)
        except (ValueError, OSError):  # no file can have this name
            break
        if spec is None:
            break
        found, places = spec.origin, spec.submodule_search_locations
        if places is None:
            break
    return None if found is None else Path(found)


# `artifact:...` references in place of paths: finding them and replacing them by paths.

ARTIFACT_PREFIX = "artifact:"


def refs_in(tree: ConfigTree) -> dict[str, str]:
    """Key -> the text after `artifact:`; an entry of a list has its number after the key.

    Example:
        >>> values = {"data": {"train_files": ["artifact:rows@ab12cd"]}}
        >>> refs_in(ConfigTree(values=values, origins={}))
        {'data.train_files.0': 'rows@ab12cd'}
    """
    return dict(_refs(tree.values, ""))


def _refs(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return (
            [(path, value.removeprefix(ARTIFACT_PREFIX))]
            if value.startswith(ARTIFACT_PREFIX)
            else []
        )
    if isinstance(value, dict):
        inner = list(cast(dict[str, Any], value).items())
    elif isinstance(value, list):
        inner = [(str(i), one) for i, one in enumerate(cast(list[Any], value))]
    else:
        return []
    return [found for name, one in inner for found in _refs(one, f"{path}.{name}".lstrip("."))]


def with_paths(tree: ConfigTree, paths: Mapping[str, str]) -> ConfigTree:
    """The tree with a path at each of the keys that `refs_in` gave."""
    values = tree.values
    references = {k: v for k, v in tree.references.items() if k not in paths}
    for key, path in paths.items():
        block, _, last = key.rpartition(".")
        above = value_in(values, block) if block else values
        if isinstance(above, list):
            listed = [*cast(list[Any], above)]
            listed[int(last)] = path
            values = replaced(values, block.split("."), listed)
        else:
            values = replaced(values, key.split("."), path)
    return replace(tree, values=values, references=references)


def named_artifacts(tree: ConfigTree) -> dict[str, Artifact]:
    """Key -> the artifact that it names; a UserError for the first name without a record."""
    refs = refs_in(tree)
    registry = ArtifactRegistry(root_of(tree)) if refs else None
    return {key: registry.one(words, key) for key, words in refs.items() if registry is not None}


def with_artifacts(tree: ConfigTree, find: Callable[[str, str], str] | None = None) -> ConfigTree:
    """The tree with paths in the place of artifacts; a name that is not known is a problem.

    `find` gives the path for a reference and a key. Nothing is hashed here: the reader of the
    content does that.
    """
    refs = refs_in(tree)
    if not refs:
        return tree
    registry = ArtifactRegistry(root_of(tree)) if find is None else None
    paths: dict[str, str] = {}
    problems = list(tree.problems)
    for key, words in refs.items():
        try:
            paths[key] = find(words, key) if find is not None else _path(registry, words, key)
        except UserError as error:
            problems.append(_unknown(key, error, tree))
    return replace(with_paths(tree, paths), problems=tuple(problems))


def _path(registry: ArtifactRegistry | None, words: str, key: str) -> str:
    assert registry is not None
    return registry.one(words, key).path


def root_of(tree: ConfigTree) -> Path:
    """The folder whose runs are meant: that of this run."""
    trainer = tree.values.get("trainer")
    written: Any = cast(dict[str, Any], trainer) if isinstance(trainer, dict) else {}
    folder = written.get("default_local_dir", TrainerConfig().default_local_dir)
    return expanded(str(folder))


def _unknown(key: str, error: UserError, tree: ConfigTree) -> Problem:
    return Problem(
        id="C013",
        severity="error",
        field=key,
        value=error.value,
        why=error.why,
        fix=error.fix,
        origin=origin_of(key, tree.origins),
    )
