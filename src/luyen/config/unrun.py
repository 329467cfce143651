"""What a check does not run, ask or read: what is wrong there only training shows."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.reading import read_text
from luyen.config.environments import read_environments
from luyen.config.model_folder.locate import folder_of, looks_local
from luyen.config.named_files import python_files
from luyen.config.plan import needs_reference
from luyen.config.reward_parts import nodes, read_components
from luyen.config.schema.run import RunConfig
from luyen.config.signals import has_teacher
from luyen.config.yaml_tree import read_tree

_TURNS = "actor_rollout_ref.rollout.multi_turn"


def unrun(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Key, and what was not done with what it names; only what this run would use.

    Example:
        >>> list(unrun(RunConfig()))
        []
    """
    is_online = config.trainer.stage == "rl"
    for key, path in python_files(config):
        if is_online or not key.startswith(("reward.", _TURNS)):
            yield key, f"{path} is not imported: what it does then, or when it is called"
    if is_online:
        yield from _judges(config)
        yield from _worlds(config)
    yield from _models(config)
    for field, paths in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for path in paths:
            if "://" not in path or path.startswith("hf://"):
                yield field, f"the rows of {path} are not read"


def _judges(config: RunConfig) -> Iterator[tuple[str, str]]:
    for path, node in nodes(read_components(config.reward)[0]):
        if node.judge is not None:
            yield f"reward.components.{path}", f"the judge at {node.judge.base_url} is not asked"


def _worlds(config: RunConfig) -> Iterator[tuple[str, str]]:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if not multi_turn.enable:
        return
    for name, choice in read_environments(multi_turn)[0].items():
        if choice.kind != "user":
            yield f"{_TURNS}.environments.{name}", "the world is not made"
    for key, path in (
        ("tool_config_path", multi_turn.tool_config_path),
        ("interaction_config_path", multi_turn.interaction_config_path),
    ):
        for words in _named_in(path):
            yield f"{_TURNS}.{key}", words


def _named_in(path: str | None) -> Iterator[str]:
    """Classes and servers that a list of tools or users names."""
    if path is None:
        return
    try:
        tree: Any = read_tree(read_text(expanded(path)), path).values
    except (OSError, UserError):
        return  # T05 and T12 say why
    for name, value in _leaves(tree):
        if name == "class_name":
            yield f"the class {value} is not imported"
        elif name in ("command", "url"):
            yield f"the server {value} is not started or asked"


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    entries = cast(Mapping[str, Any], tree).items() if isinstance(tree, Mapping) else ()
    for name, value in entries:
        yield name, value
        yield from _leaves(value)
    for value in cast(list[Any], tree) if isinstance(tree, list) else ():
        yield from _leaves(value)


def _models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Models of the hub that are not on this machine."""
    arr, reward_model = config.actor_rollout_ref, config.reward.reward_model
    used = {
        "actor_rollout_ref.model.path": arr.model.path,
        "actor_rollout_ref.model.tokenizer_path": arr.model.tokenizer_path,
        "actor_rollout_ref.ref.path": arr.ref.path if needs_reference(config) else None,
        "critic.model.path": config.critic.model.path,
        "distill.teacher_path": config.distill.teacher_path if has_teacher(config) else None,
        "reward.reward_model.model_path": reward_model.model_path if reward_model.enable else None,
    }
    for key, path in used.items():
        if path is not None and not looks_local(path) and folder_of(path) is None:
            yield key, f"{path} is not on this machine: its files are not looked at"
