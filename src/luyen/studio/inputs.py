"""Differences between the inputs of two runs: configuration, rows, versions, machine and code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.digests import STAGES
from luyen.base.rundir import RunDirectory
from luyen.base.secrets import masked_tree

ABSENT = "<absent>"
"""Placeholder value of a key that one of the runs does not have."""
_OWN = (
    "trainer.default_local_dir",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.profile.save_path",
)
"""Keys that only decide where a run is stored; ignored in comparisons."""
_FACTS = ("versions", "packages", "code", "settings", "threads", "seeds", "hardware", "revision")
_HARMLESS = ("hardware.memory_bytes",)
_SHARED_ONLY = ("packages",)
"""Blocks that depend on what a process imported: only names that both have are compared."""

_ACTS_ON = {
    "data": "prompts",
    "data.max_response_length": "rollouts",
    "data.val_files": "metrics",
    "data.val_max_samples": "metrics",
    "actor_rollout_ref.model": "rollouts",
    "actor_rollout_ref.rollout": "rollouts",
    "actor_rollout_ref.rollout.val_kwargs": "metrics",
    "actor_rollout_ref.ref": "advantages",
    "actor_rollout_ref.actor": "gradients",
    "actor_rollout_ref.actor.optim": "weights",
    "actor_rollout_ref.actor.optim.betas": "gradients",
    "actor_rollout_ref.actor.optim.clip_grad": "gradients",
    "critic": "gradients",
    "critic.model": "advantages",
    "critic.optim": "weights",
    "critic.optim.betas": "gradients",
    "critic.optim.clip_grad": "gradients",
    "reward": "rewards",
    "sandbox": "rewards",
    "algorithm": "advantages",
    "distill": "advantages",
    "preference": "advantages",
    "sft": "rollouts",
    "reward_training": "rollouts",
    "algorithm.filter_groups": "prompts",
    "trainer.seed": "prompts",
    "trainer.stage": "prompts",
    "trainer.plugins": "prompts",
    "trainer.device": "rollouts",
    "trainer.max_staleness": "rollouts",
    "trainer.async_order": "prompts",
    "trainer.critic_warmup": "gradients",
    "trainer.total_epochs": "weights",
    "trainer.total_training_steps": "weights",
    "trainer.test_freq": "metrics",
    "trainer.val_before_train": "metrics",
    "dataset.train": "prompts",
    "dataset.validation": "metrics",
}
"""The first stage that a key, or what lies below it, can change; the longest beginning counts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedInput:
    """One input that the two runs do not share.

    Example:
        >>> ChangedInput(kind="config", name="trainer.seed", a=0, b=1, acts_on="prompts").name
        'trainer.seed'
    """

    kind: str
    """`config`, `file`, `dataset`, or a block of the manifest: `versions`, `settings`, ..."""
    name: str
    """Dotted key; of a `file`, the key that names it, and what below it."""
    a: Any
    """Value in the first run."""
    b: Any
    """Value in the second run."""
    acts_on: str | None
    """The first stage it can change; None: any of them (the environment), or none."""


def changed_inputs(a: RunDirectory, b: RunDirectory) -> list[ChangedInput]:
    """Every recorded input that differs: configuration, content of files, rows, then the rest."""
    found = [
        _changed("config", name, one, other)
        for name, one, other in _unequal(_config(a), _config(b))
        if name not in _OWN
    ]
    facts = changed_facts(a.read_manifest(), b.read_manifest())
    is_said = any(one.name == "trainer.seed" for one in found)
    return found + [one for one in facts if one.kind != "seeds" or not is_said]


def follows_the_clock(run: RunDirectory) -> bool:
    """Whether a run used completion order, so that repeating it gives other numbers."""
    config = _config(run)
    is_ahead = config.get("trainer.max_staleness", 0) > 0
    return is_ahead and config.get("trainer.async_order") == "completion"


def changed_facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ChangedInput]:
    """What differs between two manifests: content of files and rows first, then the machine.

    A block that one of them lacks was not recorded by its version, and is not compared.
    """
    found: list[ChangedInput] = []
    if "files" in a and "files" in b:
        found += _changed_files(a["files"], b["files"])
    rows = _unequal(a.get("datasets") or {}, b.get("datasets") or {})
    found += [_changed("dataset", f"dataset.{name}", one, other) for name, one, other in rows]
    for kind in (kind for kind in _FACTS if kind in a and kind in b):
        pairs = _unequal(dict(_leaves(a[kind], kind)), dict(_leaves(b[kind], kind)))
        found += [
            ChangedInput(kind=kind, name=name, a=one, b=other, acts_on=None)
            for name, one, other in pairs
            # An empty block is listed as a leaf of its own; skip it.
            if name not in (*_HARMLESS, kind)
            and not (kind in _SHARED_ONLY and ABSENT in (one, other))
        ]
    return found


def _changed_files(
    a: Mapping[str, Mapping[str, str]], b: Mapping[str, Mapping[str, str]]
) -> list[ChangedInput]:
    """Files whose content differs; a different path with the same content is equal."""
    hashes = [{name: facts["fingerprint"] for name, facts in files.items()} for files in (a, b)]
    return [
        _changed("file", name, _file(a.get(name), one), _file(b.get(name), other))
        for name, one, other in _unequal(*hashes)
    ]


def _file(facts: Mapping[str, str] | None, fingerprint: str) -> str:
    return fingerprint if facts is None else f"{facts['path']} {fingerprint}"


def suspects(inputs: Sequence[ChangedInput], stage: str) -> list[ChangedInput]:
    """The inputs that can explain a difference that begins in this stage, the likeliest first.

    First those that act on this stage, then those that act before it, then those that may act
    anywhere. Inputs that should only act later come last.
    """
    ranked = [(rank, one) for one in inputs if (rank := _rank(one, stage)) is not None]
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def acts_on(name: str) -> str | None:
    """The first stage that an input of this name can change; None when it changes none.

    Example:
        >>> acts_on("actor_rollout_ref.actor.optim.lr"), acts_on("trainer.logger")
        ('weights', None)
    """
    parts = name.split(".")
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((_ACTS_ON[key] for key in beginnings if key in _ACTS_ON), None)


def _rank(one: ChangedInput, stage: str) -> int | None:
    if one.kind in _FACTS:
        return 2
    if one.acts_on is None:
        return None
    distance = STAGES.index(one.acts_on) - STAGES.index(stage)
    return 0 if distance == 0 else 1 if distance < 0 else 3


def _changed(kind: str, name: str, a: Any, b: Any) -> ChangedInput:
    return ChangedInput(kind=kind, name=name, a=a, b=b, acts_on=acts_on(name))


def _config(run: RunDirectory) -> dict[str, Any]:
    return dict(_leaves(masked_tree(run.read_settings())))


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list and an empty mapping are leaves."""
    if isinstance(tree, Mapping) and tree:
        for name, inner in tree.items():
            yield from _leaves(inner, f"{above}.{name}" if above else str(name))
    elif above:
        yield above, tree


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = list(dict.fromkeys([*a, *b]))
    pairs = [(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]
