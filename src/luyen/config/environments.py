"""`multi_turn.environments` and verl's interaction file: parsed, with what is wrong in them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import expanded, read_text
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.plugins import read_python
from luyen.config.schema.actor_rollout_ref import EnvironmentConfig, MultiTurnConfig

ENVIRONMENT_ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "user": ((), ("replies", "replies_key")),
    "class": (("path", "name"), ("kwargs",)),
    "interaction": (("class_name",), ("config",)),
    "reasoning_gym": ((), ("dataset", "config", "attempts", "feedback")),
    "verifiers": (("id",), ("args",)),
}
"""Built-in kind -> required and optional arguments; a test keeps them in sync."""
PACKAGES = {"reasoning_gym": ("reasoning_gym", "tasks"), "verifiers": ("verifiers", "environments")}
"""Kind -> the package it needs, and the extra that brings it."""


def argument_faults(choice: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with the arguments of a built-in environment, and the fix.

    Example:
        >>> [why for why, _ in argument_faults(EnvironmentConfig(kind="verifiers"))]
        ['an environment of kind `verifiers` needs `id`']
    """
    needed, optional = ENVIRONMENT_ARGUMENTS.get(choice.kind, ((), tuple(choice.kwargs)))
    for hparam in choice.kwargs:
        if hparam not in (*needed, *optional):
            why = f"an environment of kind `{choice.kind}` takes no `{hparam}`"
            yield why, did_you_mean(hparam, (*needed, *optional))
    for hparam in needed:
        if hparam not in choice.kwargs:
            yield f"an environment of kind `{choice.kind}` needs `{hparam}`", f"set kwargs.{hparam}"


def read_environments(
    multi_turn: MultiTurnConfig,
) -> tuple[dict[str, EnvironmentConfig], list[str]]:
    """The environments by name, and a sentence for each malformed one.

    Example:
        >>> multi_turn = MultiTurnConfig(environments={"clerk": {"kind": "user"}})
        >>> read_environments(multi_turn)[0]["clerk"].kind
        'user'
        >>> read_environments(MultiTurnConfig(environments={"clerk": {"knid": "user"}}))[1][0]
        '`clerk`: kind: Field required'
    """
    found: dict[str, EnvironmentConfig] = {}
    wrong: list[str] = []
    for name, written in multi_turn.environments.items():
        if not isinstance(written, Mapping):
            wrong.append(f"`{name}`: expected {{kind: KIND, kwargs: {{...}}}}")
            continue
        try:
            given = dict(cast(Mapping[str, Any], written))
            found[name] = EnvironmentConfig.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            wrong.append(f"`{name}`: {where}: {first['msg']}")
    return found, wrong


# verl's file of user simulators, read without importing the classes.

FIELD = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
_KEYS = ("name", "class_name", "config")
_FIX = "write interaction: [{name: NAME, class_name: PACKAGE.MODULE.CLASS, config: {...}}]"


def read_interactions(path: str) -> dict[str, EnvironmentConfig]:
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
    found: dict[str, EnvironmentConfig] = {}
    for number, raw in enumerate(cast(list[Any], listed), start=1):
        where = f"{path}: interaction {number}"
        name, choice = _entry(raw, where, expanded(path).parent)
        if name in found:
            raise UserError(where, name, "two interactions have this name", "rename one of them")
        found[name] = choice
    return found


def _entry(raw: Any, where: str, folder: Path) -> tuple[str, EnvironmentConfig]:
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
    return name, EnvironmentConfig(kind="interaction", kwargs=kwargs)


def _require_python(class_name: str, where: str) -> None:
    try:
        read_python(Path(class_name.rpartition(":")[0]))
    except OSError as error:
        raise UserError(where, class_name, str(error), "correct the path or the file") from error


def _default_name(class_name: str) -> str:
    """The name that verl gives: the class's own, without `Interaction`, in small letters."""
    return class_name.replace(":", ".").rpartition(".")[2].removesuffix("Interaction").lower()
