"""Which keys may be changed for a step that is replayed, and the configuration with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.config.tree import leaves
from luyen.train.build_learning import learning_rules
from luyen.train.process import import_plugins
from luyen.train.replay.record import RunRecord

_DRAWN = "it says how rollouts are drawn, and those of a recorded step are drawn already"
_WEIGHTS = "it says what weights there are, and a replay has those of the run"
_REASONS: dict[str, str | None] = {
    "data": "it says what is drawn from, and the prompts of a recorded step are drawn already",
    "actor_rollout_ref.model": _WEIGHTS,
    "actor_rollout_ref.actor": None,
    "actor_rollout_ref.ref": None,
    "actor_rollout_ref.rollout": _DRAWN,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": None,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": None,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": None,
    "critic": None,
    "critic.model": _WEIGHTS,
    "reward": "no reward is called in a replay: the scores are those of the record",
    "algorithm": None,
    "algorithm.filter_groups": "it chooses groups, and those of a recorded step are chosen already",
    "sft": None,
    "preference": None,
    "distill": None,
    "distill.teacher_path": _WEIGHTS,
    "trainer": "it does not act on what a step computes from its rollouts",
    "trainer.seed": "random numbers belong to the run: prompts and rollouts were drawn with it",
    "trainer.critic_warmup": None,
    "trainer.total_epochs": None,
    "trainer.total_training_steps": None,
}
"""Why a key, or what lies below it, cannot act on a recorded step; the longest beginning counts."""


def changed_config(record: RunRecord, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with other values, checked like any other.

    A UserError for a key that cannot act on a recorded step, for a value that the check refuses,
    and for what needs something that the run did not have.
    """
    before, file = record.config(), record.directory.config
    import_plugins(before.trainer.plugins)  # the rules below know what they register
    new = _new_errors(file, overrides)
    if new:
        raise UserError(new[0].field, new[0].value, new[0].why, new[0].fix)
    after = record.config(overrides)
    pairs = changed_keys(before, after)
    if not pairs:
        why = "the run had these very values"
        raise UserError("--set", " ".join(overrides), why, "give another value")
    for key, (_, value) in pairs.items():
        reason = refusal(key)
        if reason is not None:
            fix = "change keys of actor, ref, critic or algorithm; for others begin a new run"
            raise UserError(key, value, reason, fix)
    _refuse_what_was_not_there(before, after)
    return after


def refusal(key: str) -> str | None:
    """Why a key cannot be changed in a replay; None: it can.

    Example:
        >>> refusal("actor_rollout_ref.actor.clip_ratio") is None
        True
        >>> refusal("data.train_files")[:32]
        'it says what is drawn from, and '
    """
    parts = key.split(".")
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((_REASONS[known] for known in beginnings if known in _REASONS), None)


def changed_keys(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both."""
    one, other = (dict(leaves(config.model_dump(mode="json"))) for config in (before, after))
    names = sorted(one.keys() | other.keys())
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _new_errors(file: Path, overrides: Sequence[str]) -> list[Problem]:
    """Errors that the changes brought; what is wrong with the run's own files is not our matter."""
    known = {(p.id, p.field) for p in check([file], starts_a_run=False).problems}
    found = check([file], overrides, starts_a_run=False).problems
    return [p for p in found if p.severity == "error" and (p.id, p.field) not in known]


def _refuse_what_was_not_there(before: RunConfig, after: RunConfig) -> None:
    if before.trainer.stage != "rl":
        return
    had, needs = learning_rules(before).needs, learning_rules(after).needs
    estimator = after.algorithm.adv_estimator
    if needs.values and not had.values:
        why = "it needs a critic, and the run trained none"
        fix = "choose an estimator without a critic"
        raise UserError("algorithm.adv_estimator", estimator, why, fix)
    if needs.reward and not had.reward:
        why = "the run learned from its teacher alone, and nobody judged its rollouts"
        fix = "leave it at 0"
        raise UserError("distill.task_weight", after.distill.task_weight, why, fix)
    if needs.baselines and not had.baselines:
        why = "it compares with greedy answers, and the run drew none"
        fix = "choose an estimator without greedy answers"
        raise UserError("algorithm.adv_estimator", estimator, why, fix)
