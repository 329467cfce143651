"""Other names for our keys and values: those of verl's older blocks, and of stages by algorithm.

What is written under such a name is read under ours, with a note that says so. Written under both
names it is an error.
"""

from dataclasses import replace
from typing import Any, cast

from luyen.config.fields import all_fields
from luyen.config.problem import Problem, Severity
from luyen.config.tree import Tree, leaves, merged, nested, origin_of, removed
from luyen.config.verl_keys import RENAMED

_ESTIMATOR, _LOSS = "algorithm.adv_estimator", "preference.loss_type"
STAGES: dict[str, dict[str, Any]] = {
    "ppo": {"trainer.stage": "rl", _ESTIMATOR: "gae"},
    "grpo": {"trainer.stage": "rl", _ESTIMATOR: "grpo"},
    "rloo": {"trainer.stage": "rl", _ESTIMATOR: "rloo"},
    "dpo": {"trainer.stage": "preference", _LOSS: "sigmoid"},
    "kto": {"trainer.stage": "preference", _LOSS: "kto"},
    "orpo": {"trainer.stage": "preference", _LOSS: "orpo"},
    "simpo": {"trainer.stage": "preference", _LOSS: "simpo"},
    "rm": {"trainer.stage": "reward_model"},
    "pt": {"trainer.stage": "sft"},
    "reward": {"trainer.stage": "reward_model"},
    "gkd": {"trainer.stage": "distill"},
}
"""Word of another project for `trainer.stage` -> keys that mean it."""
LOSSES = {"dpo": "sigmoid"}
"""Word for `preference.loss_type` -> the loss."""


def with_our_names(tree: Tree) -> Tree:
    """The tree under our names, with a note for each other name."""
    tree = _renamed(tree)
    words = dict(leaves(tree.values))
    stage = words.get("trainer.stage")
    if isinstance(stage, str) and stage in STAGES:
        tree = _read_as(tree, "trainer.stage", stage, STAGES[stage])
    loss = words.get(_LOSS)
    if isinstance(loss, str) and loss in LOSSES:
        tree = _read_as(tree, _LOSS, loss, {_LOSS: LOSSES[loss]})
    listed = cast(list[Any], loss) if isinstance(loss, list) else []
    if any(one in LOSSES for one in listed if isinstance(one, str)):
        ours = [LOSSES.get(str(one), one) for one in listed]
        tree = _read_as(tree, _LOSS, loss, {_LOSS: ours})
    return tree


def _read_as(tree: Tree, path: str, word: Any, keys: dict[str, Any]) -> Tree:
    """The tree with these keys for a word; another word written at one of them is an error."""
    origin, said = origin_of(path, tree.origins), ", ".join(f"{k}={v}" for k, v in keys.items())
    problems = [_problem("note", path, word, f"read as {said}", f"write {said}", tree)]
    written = dict(leaves(tree.values))
    values = tree.values
    for key, value in keys.items():
        other = written.get(key)
        if key != path and other is not None and LOSSES.get(str(other), other) != value:
            why, fix = f"`{path}: {word}` means {key}={value}", f"drop one of the two: {said}"
            problems.append(_problem("error", key, other, why, fix, tree))
        values = merged(values, nested(key.split("."), value))
    origins = {**dict.fromkeys(keys, origin), **tree.origins}
    return replace(tree, values=values, origins=origins, problems=(*tree.problems, *problems))


def _renamed(tree: Tree) -> Tree:
    for old, value in leaves(tree.values):
        new = _new_name(old)
        if new is None or old in all_fields():
            continue
        origin = origin_of(old, tree.origins)
        written = dict(leaves(tree.values))
        values = removed(tree.values, old.split("."))
        severity: Severity = "note"
        why, fix = f"another name for {new}, and read as it", f"write {new}"
        if new in written and written[new] != value:
            severity, why = "error", f"another name for {new}, which is written too"
            fix = "keep one of the two"
        elif value is None and new not in written:
            severity, why, fix = "note", f"another name for {new}, and empty", "drop the line"
        else:
            values = merged(values, nested(new.split("."), value))
        origins = {path: at for path, at in tree.origins.items() if path != old} | {new: origin}
        said = _problem(severity, old, value, why, fix, replace(tree, origins={old: origin}))
        tree = replace(
            tree, values=_pruned(values, old), origins=origins, problems=(*tree.problems, said)
        )
    return tree


def _new_name(path: str) -> str | None:
    """Our name for a key, or for one below a block that has another name here."""
    block, rest = path, ""
    while block:
        if block in RENAMED:
            return f"{RENAMED[block]}{rest}"
        block, _, name = block.rpartition(".")
        rest = f".{name}{rest}"
    return None


def _pruned(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The values without the blocks around `path` that hold nothing any more."""
    names = path.split(".")[:-1]
    while names:
        inner: Any = values
        for name in names:
            inner = inner[name]
        if inner:
            break
        values = removed(values, names)
        names = names[:-1]
    return values


def _problem(severity: Severity, path: str, value: Any, why: str, fix: str, tree: Tree) -> Problem:
    origin = origin_of(path, tree.origins)
    return Problem(
        id="C016", severity=severity, field=path, value=value, why=why, fix=fix, origin=origin
    )
