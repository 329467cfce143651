"""Which reward judges recorded rollouts: that of a file, that of the run, or one with changes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.config.artifact_refs import with_artifacts
from luyen.config.check import check_tree
from luyen.config.load import load, read_override
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.tree import Tree, merge, removed

_BLOCK = "reward"
_OPTION = "--reward"


def rescored_config(
    directory: RunDirectory, file: Path | None, overrides: Sequence[str]
) -> RunConfig:
    """The configuration of a run with another reward block, checked like any other.

    The block of a file takes the place of the run's own, whole: nothing of the old one is left.
    Without a file the run's own is meant. `overrides` are laid over either. Plugins of both are
    known.
    """
    run = with_artifacts(load([directory.config], []))
    tree = run if file is None else _with_block(run, with_artifacts(load([file], [])), file)
    tree = merge([tree, *(_override(text) for text in overrides)])
    known = {(p.id, p.field) for p in check_tree(run, starts_a_run=False).problems}
    report = check_tree(tree, starts_a_run=False)
    for problem in report.problems:
        is_old = (problem.id, problem.field) in known and not problem.field.startswith(_BLOCK)
        if problem.severity == "error" and not is_old:
            raise _refused(problem)
    return report.config


def _with_block(run: Tree, other: Tree, file: Path) -> Tree:
    for problem in other.problems:
        if problem.severity == "error":
            raise _refused(problem)
    block = other.values.get(_BLOCK)
    if not isinstance(block, dict) or not block:
        why = "it has no `reward` block"
        raise UserError(_OPTION, str(file), why, "write `reward:` and its keys into it")
    origins = {k: o for k, o in run.origins.items() if not _is_of_reward(k)}
    origins |= {k: o for k, o in other.origins.items() if _is_of_reward(k)}
    plugins = [*_plugins(run), *_plugins(other)]
    values = {**removed(run.values, [_BLOCK]), _BLOCK: block}
    values["trainer"] = {**run.values.get("trainer", {}), "plugins": list(dict.fromkeys(plugins))}
    return replace(run, values=values, origins=origins)


def _plugins(tree: Tree) -> list[str]:
    named = tree.values.get("trainer", {}).get("plugins") or []
    return [named] if isinstance(named, str) else list(named)


def _override(text: str) -> Tree:
    found = read_override(text)
    if found.problems:
        raise _refused(found.problems[0])
    strange = [key for key in found.origins if not _is_of_reward(key)]
    if strange:
        why = "only the reward is another; rollouts, rows and models are those of the run"
        raise UserError(strange[0], text, why, "change keys of the block `reward`")
    return found


def _is_of_reward(key: str) -> bool:
    return key.partition(".")[0] == _BLOCK


def _refused(problem: Problem) -> UserError:
    return UserError(problem.field, problem.value, problem.why, problem.fix)
