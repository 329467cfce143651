"""verl's file of user simulators, read without importing any of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.reading import read_text
from luyen.base.suggest import did_you_mean
from luyen.config.python_file import read_python
from luyen.config.schema.rollout import EnvironmentChoice
from luyen.config.yaml_tree import read_tree

FIELD = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
_KEYS = ("name", "class_name", "config")
_FIX = "write interaction: [{name: NAME, class_name: PACKAGE.MODULE.CLASS, config: {...}}]"


def read_interactions(path: str) -> dict[str, EnvironmentChoice]:
    """The users that a file lists, by name; a UserError names the entry that is wrong."""
    try:
        tree = read_tree(read_text(expanded(path)), path)
    except OSError as error:
        raise UserError(FIELD, path, f"it cannot be read: {error}", _FIX) from error
    if tree.problems:
        first = tree.problems[0]
        raise UserError(FIELD, path, f"it cannot be read: {first.origin}: {first.why}", first.fix)
    listed = tree.values.get("interaction")
    if not isinstance(listed, list) or not listed:
        raise UserError(FIELD, path, "it lists no interactions", _FIX)
    found: dict[str, EnvironmentChoice] = {}
    for number, raw in enumerate(cast(list[Any], listed), start=1):
        where = f"{path}: interaction {number}"
        name, choice = _entry(raw, where, expanded(path).parent)
        if name in found:
            raise UserError(where, name, "two interactions have this name", "rename one of them")
        found[name] = choice
    return found


def _entry(raw: Any, where: str, folder: Path) -> tuple[str, EnvironmentChoice]:
    entry: Mapping[str, Any] = cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
    class_name = entry.get("class_name")
    if not isinstance(class_name, str) or not class_name:
        raise UserError(where, raw, "an entry names its class", _FIX)
    unknown = [str(key) for key in entry if key not in _KEYS]
    if unknown:
        raise UserError(where, unknown[0], "no such key", did_you_mean(unknown[0], _KEYS))
    config: Any = entry.get("config") or {}
    if not isinstance(config, dict):
        raise UserError(where, config, "`config` is no mapping", "write config: {KEY: VALUE}")
    if ".py:" in class_name:
        class_name = str(folder / expanded(class_name))
        _require_python(class_name, where)
    name = str(entry.get("name") or _default_name(class_name))
    settings = {**cast(dict[str, Any], config), "name": name}  # as verl hands it over
    kwargs = {"class_name": class_name, "config": settings}
    return name, EnvironmentChoice(kind="interaction", kwargs=kwargs)


def _require_python(class_name: str, where: str) -> None:
    try:
        read_python(Path(class_name.rpartition(":")[0]))
    except OSError as error:
        raise UserError(where, class_name, str(error), "mend the path or the file") from error


def _default_name(class_name: str) -> str:
    """The name that verl gives: the class's own, without `Interaction`, in small letters."""
    return class_name.replace(":", ".").rpartition(".")[2].removesuffix("Interaction").lower()
