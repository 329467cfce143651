"""`${...}`: other keys (defaults included) and OmegaConf's resolvers."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Mapping, Tree, leaves, merged, origin_of, removed, replaced


def interpolate(tree: Tree) -> Tree:
    """Replace `${...}` by what it names; what cannot be resolved is reported and left out."""
    pending = {path: value for path, value in leaves(tree.values) if "${" in str(value)}
    if not pending:
        return tree
    values, problems = tree.values, list(tree.problems)
    sound = _sound(tree.values)
    for path, value in pending.items():
        try:
            values = replaced(values, path.split("."), _resolve(path, value, sound))
        except OmegaConfBaseException as error:
            problems.append(
                Problem(
                    id="C008",
                    severity="error",
                    field=path,
                    value=value,
                    why=f"cannot be resolved: {str(error).splitlines()[0]}",
                    fix="name an existing key, or a resolver such as ${oc.env:HOME}",
                    origin=origin_of(path, tree.origins),
                )
            )
            values = removed(values, path.split("."))
    return Tree(values=values, origins=tree.origins, problems=tuple(problems))


def _sound(written: Mapping) -> DictConfig:
    """Everything that may be named, defaults included; not what OmegaConf itself cannot hold."""
    values = merged(RunConfig().model_dump(mode="json"), written)
    for path, value in leaves(written):
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            values = removed(values, path.split("."))
    return OmegaConf.create(values)


def _resolve(path: str, value: Any, sound: DictConfig) -> Any:
    OmegaConf.create({"value": value})  # a malformed expression raises here, by itself
    found = OmegaConf.select(sound, path, throw_on_missing=True)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
